"""Index queries on their way to the scores: bytes as the reference's but for roundings of turns."""

import pytest
import torch

from openv41 import ops


def kernel():
    from openv41.ops.packed_index_triton import pack_index_queries  # noqa: PLC0415

    return pack_index_queries


def inputs(device, dtype, tokens, heads, width, *, still):
    """Queries, turns (by quarters if ``still``, which no rounding spoils), weights and a factor."""
    turns = torch.tensor([1, 1j, -1, -1j])[torch.randint(0, 4, (tokens, width // 4))]
    if not still:
        turns = ops.rope_table(torch.arange(tokens) * 37, ops.rope_frequencies(width // 2, 1e4))
    q = torch.randn(tokens, heads, width) * torch.randn(tokens, heads, 1).exp2()
    weights = torch.randn(tokens, heads).to(device, dtype)
    return q.to(device, dtype), turns.to(device), weights, width**-0.5 * heads**-0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 3, 32), (3, 17, 128), (2, 1, 64)])
def test_bytes_are_those_of_the_reference(device, tokens, heads, width, dtype):
    given = inputs(device, dtype, tokens, heads, width, still=True)
    got, want = kernel().run(*given), ops.pack_index_queries.reference(*given)
    assert torch.equal(got[0], want[0])
    if dtype == torch.float32 or torch.cuda.is_available():
        assert torch.equal(got[1], want[1])
    else:
        assert torch.equal(got[1], (given[2].float() * given[3]).bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turned_queries_differ_by_roundings(device, dtype):
    given = inputs(device, dtype, 5, 4, 128, still=False)
    got, want = kernel().run(*given)[0], ops.pack_index_queries.reference(*given)[0]
    assert (got != want).float().mean() < 0.01


def test_no_token_and_refusals(device):
    q, turns, weights, factor = inputs(device, torch.float32, 1, 3, 32, still=True)
    packed, scaled = kernel().run(q[:0], turns[:0], weights[:0], factor)
    assert packed.shape == (0, 3, 17)
    assert scaled.shape == (0, 3)
    refuse = kernel().refuse
    assert "48 numbers" in refuse(q.new_zeros(1, 3, 48), turns, weights, factor)
    assert "float64" in refuse(q.double(), turns, weights, factor)
    assert "complex128" in refuse(q, turns.to(torch.complex128), weights, factor)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_a_step_of_tokens_on_a_gpu(tokens):
    given = inputs("cuda", torch.bfloat16, tokens, 32, 128, still=False)
    with ops.kernels("required"):
        got = ops.pack_index_queries(*given)
    want = ops.pack_index_queries.reference(*given)
    assert (got[0] != want[0]).float().mean() < 0.01
    assert torch.equal(got[1], want[1])
