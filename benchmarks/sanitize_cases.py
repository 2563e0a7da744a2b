"""Every kernel of ``openv41.ops``, forward and backward, once on few and odd numbers of things.

A case is named by its op and by the form of the kernel that its sizes ask for; the meta tests fail
where a kernel has none. On a CPU cases run the references.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.h200 import cache_writers, indexer, mhc, row_ops
from benchmarks.h200 import sparse_attention as attention
from openv41 import ops
from openv41.ops import engram_cuda

Run = Callable[[torch.Generator], Any]
EPS = 1e-6


def normal(g: torch.Generator, *shape: int) -> Tensor:
    """Random leaves in bfloat16."""
    return torch.randn(shape, generator=g, device=g.device).bfloat16().requires_grad_()


def uniform(g: torch.Generator, *shape: int) -> Tensor:
    """Random float32 between 0 and 1."""
    return torch.rand(shape, generator=g, device=g.device)


def integers(g: torch.Generator, end: int, *shape: int) -> Tensor:
    """Random integers below an end."""
    return torch.randint(end, shape, generator=g, device=g.device)


def with_gradients(out: Any, leaves: tuple[Tensor, ...]) -> Any:  # noqa: ANN401
    """Run the backward with ones for a gradient."""
    outputs = [out] if isinstance(out, Tensor) else list(out)
    return torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs])


def hashed(g: torch.Generator) -> tuple[Any, ...]:
    """Arguments of the hash: two orders, three heads."""
    primes = integers(g, 50, 2, 3) + 50
    offsets = (primes.flatten().cumsum(0) - primes.flatten()).view(2, 3)
    return integers(g, 40, 7, 3) - 1, integers(g, 9999, 3) * 2 + 1, primes, offsets, 2


def looked_up(g: torch.Generator) -> Tensor:
    """Rows of a table by their hashes."""
    codes = integers(g, 120, 600, 96).to(torch.uint8).view(torch.float8_e4m3fn)
    scales = (integers(g, 4, 600, 3) + 124).to(torch.uint8)
    return ops.lookup_ngrams(*hashed(g), codes, scales.view(torch.float8_e8m0fnu), torch.bfloat16)


def engram(g: torch.Generator, tokens: int, num: int, dim: int) -> Any:  # noqa: ANN401
    """The gated update and its gradients, its gates, and the addition alone."""
    x, key, value = normal(g, tokens, num, dim), normal(g, tokens, num, dim), normal(g, tokens, dim)
    weights = normal(g, num, dim), normal(g, num, dim)
    shown = uniform(g, tokens) < 0.3
    given = x, key, value, *weights
    found = with_gradients(ops.engram_update(*given, EPS, shown), given)
    with torch.no_grad():
        gate = ops.engram_gate(x, key, *weights, EPS)
        return found, ops.engram_update(*given, EPS), ops.add_gated(x, gate, value)


def engram_native(g: torch.Generator) -> Any:  # noqa: ANN401
    """The gated update and its gradients in CUDA C++, which the op does not choose."""
    given = normal(g, 9, 4, 256), normal(g, 9, 4, 256), normal(g, 9, 256)
    given = *(t.detach() for t in given), uniform(g, 4, 256), uniform(g, 4, 256)
    shown = uniform(g, 9) < 0.3
    if g.device.type != "cuda":
        return ops.engram_update(*given, EPS, shown)
    out = engram_cuda.forward((*given, shown), EPS)
    return engram_cuda.backward((*given, shown), out, EPS)


def written(g: torch.Generator) -> None:
    """Rows of each format."""
    for kind in cache_writers.KINDS:
        cache_writers.written(**cache_writers.inputs(kind, 5, g))


def experts(g: torch.Generator) -> Any:  # noqa: ANN401
    """Tokens to the rows of their experts, products, and back."""
    x, weight = normal(g, 33, 40), normal(g, 5, 24, 40)
    ids = uniform(g, 33, 5).argsort(dim=1)[:, :3].sort(dim=1).values
    order, counts = ops.order_pairs(ids, 5)
    products = ops.grouped_linear(ops.take_pairs(x, order, 3), weight, counts)
    return with_gradients(ops.combine(products, order, 3), (x, weight))


def routed(g: torch.Generator) -> Any:  # noqa: ANN401
    """Choice and weights of experts."""
    return ops.route(uniform(g, 5, 70), uniform(g, 70), 3, 1.0, 2.5, normalise=True)


def row_op(op: row_ops.Op, make: Callable[..., Any], *sizes: int) -> Run:
    """An op of single rows, and its gradients."""
    return lambda g: row_ops.train(op)(**make(*sizes, g))


def boundary(g: torch.Generator, tokens: int, dim: int | None = None) -> Any:  # noqa: ANN401
    """All that happens to the streams between two blocks, at once and in its parts."""
    given = mhc.with_gradients(tokens, g)
    if dim is not None:  # fewer numbers of each stream
        given |= {n: given[n].detach()[..., :dim].contiguous() for n in ("x", "y", "norm")}
        given["fn"] = given["fn"].detach()[:, : mhc.STREAMS * dim].contiguous()
        given["grads"] = [grad[..., :dim].contiguous() for grad in given["grads"]]
        given |= {n: given[n].requires_grad_() for n in ("x", "y", "norm", "fn")}
    found = mhc.step(**given)
    x, y, b, c, a = (given[n] for n in mhc.NAMES[:5])
    with_gradients(ops.update_streams(x, y, b, c), (x, y, b, c))
    with_gradients(ops.mix_streams(x, a), (x, a))
    weights = {n: given[n] for n in ("fn", "base", "scale")}
    mixes = ops.predict_mix(x, **weights, **mhc.CONSTANTS)
    return found, with_gradients(mixes, (x, *weights.values()))


def packed(g: torch.Generator, queries: int, heads: int, rows: int = 700) -> Tensor:
    """Attention over packed rows, of which some are absent."""
    given = attention.packed_inputs(queries, heads, rows, g)
    for name in ("window_rows", "main_rows"):
        given[name] = given[name].masked_fill(uniform(g, *given[name].shape) < 0.1, -1)
    return ops.packed_sparse_attention(**given)


def trained(g: torch.Generator, tokens: int, heads: int) -> Any:  # noqa: ANN401
    """Attention with its gradients, and the masses."""
    given = attention.training_inputs(tokens, heads, g)
    return attention.train(**given), attention.masses(**given)


def chosen(g: torch.Generator, size: int, k: int, *, masked: bool = False) -> Tensor:
    """The best entries of rows with many equal ones; ``masked`` is what CUDA C++ refuses."""
    scores = (uniform(g, 3, size) * 50).round()
    visible = torch.tensor([size, size - 7, size // 2], device=g.device)
    allowed = uniform(g, 3, size) < 0.8 if masked else None
    return ops.select_top_k(scores, allowed, k, None if masked else visible)


def candidates(g: torch.Generator) -> Tensor:
    """Blocks of entries."""
    visible = torch.tensor([1003, 9, 500], device=g.device)
    return ops.choose_candidates(uniform(g, 3, 1003), visible, 4, 8)


def divergence(g: torch.Generator) -> Any:  # noqa: ANN401
    """The loss of a selection, and its gradient."""
    scores = uniform(g, 5, 7).requires_grad_()
    return with_gradients(ops.selection_divergence(scores, uniform(g, 5, 7)), (scores,))


def decoded(g: torch.Generator, *, pooled: bool) -> Tensor:
    """Scores of packed keys, some of them not seen; all, or those of a few blocks."""
    given = indexer.decode_inputs(3, 192, g)
    given["visible"] = torch.tensor([[192], [131], [9]], device=g.device)
    if pooled:
        pools = torch.tensor([0, 2, 7, -1], device=g.device)
        given |= {"pools": pools.expand(3, 1, 4).contiguous(), "num_entries": 32}
    return ops.packed_index_scores(**given)


def prefilled(g: torch.Generator, entries: int) -> Any:  # noqa: ANN401
    """Scores and choice of a prompt, with a pool of blocks."""
    return ops.packed_index_choice(**indexer.prefill_inputs(5, entries, g) | {"num_blocks": 4})


def each() -> Iterator[tuple[str, Run]]:
    """Yield names and functions of a generator, whose device the kernels run on."""
    yield "hash_ngrams", lambda g: ops.hash_ngrams(*hashed(g))
    yield "lookup_ngrams", looked_up
    yield "engram_update engram_gate add_gated", lambda g: engram(g, 5, 3, 40)
    yield "engram_update: CUDA C++", engram_native
    yield "write_latents", written
    yield "take_pairs order_pairs grouped_linear combine", experts
    yield "route", routed
    yield "rms_norm", row_op(row_ops.norm, row_ops.norm_inputs, 5, 72)
    yield "rotate", row_op(row_ops.rope, row_ops.rope_inputs, 5, 3)
    yield "clamped_swiglu", row_op(row_ops.swiglu, row_ops.swiglu_inputs, 5, 72)
    yield "mega_mhc update_streams mix_streams predict_mix", lambda g: boundary(g, 5)
    yield "mega_mhc: tens of tokens", lambda g: boundary(g, 67)
    yield "mega_mhc: many tokens", lambda g: boundary(g, 261)
    yield "mega_mhc: Triton", lambda g: boundary(g, 35, 40)
    yield "packed_sparse_attention", lambda g: packed(g, 33, 64)
    yield "packed_sparse_attention: parts", lambda g: packed(g, 3, 40)
    yield "packed_sparse_attention: few heads", lambda g: packed(g, 3, 5)
    yield "sparse_attention attention_mass", lambda g: trained(g, 37, 64)
    yield "sparse_attention attention_mass: few heads", lambda g: trained(g, 37, 5)
    yield "index_scores", lambda g: ops.index_scores(**indexer.dense_inputs(5, 70, g))
    yield "selected_scores", lambda g: indexer.train(**indexer.training_inputs(33, g))
    yield "selection_divergence", divergence
    yield "select_top_k", lambda g: chosen(g, 1003, 99)
    yield "select_top_k: groups", lambda g: chosen(g, 40_001, 512)
    yield "select_top_k: Triton", lambda g: chosen(g, 1003, 99, masked=True)
    yield "choose_candidates", candidates
    yield "packed_index_scores", lambda g: decoded(g, pooled=False)
    yield "packed_index_scores: pools", lambda g: decoded(g, pooled=True)
    yield "packed_index_choice", lambda g: prefilled(g, 640)
    yield "packed_index_choice: groups", lambda g: prefilled(g, 20_032)


CASES = dict(each())
