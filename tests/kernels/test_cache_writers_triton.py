"""Cache writers: the packed bytes are the reference's but for roundings of norm and turn."""

from importlib import import_module

import pytest
import torch

from openv41.ops import rope
from openv41.ops.cache_writers import QUANTIZERS, write_latents

NORM_EPS = 1e-20
ROW_BYTES = {"fp8": (512, 528), "fp4_e4m3": (512, 288), "mxfp4": (128, 68)}
each_form = pytest.mark.parametrize("form", ROW_BYTES)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture
def launch(device):
    return import_module("openv41.ops.cache_writers_triton").write_latents


def columns(form, width):
    block, per_byte = (16 if form == "fp4_e4m3" else 32), (1 if form == "fp8" else 2)
    return width // per_byte + -(-width // block)


def table_of(count, pairs, device):
    table = rope.rope_table(torch.arange(count) * 37, rope.rope_frequencies(2 * pairs, 1e4))
    return table.to(device)


def still(count, pairs, device):
    """A rotation by nothing."""
    return torch.ones(count, pairs, dtype=torch.complex64, device=device)


def exact_rows(count, width):
    """Rows with a mean square of 4: their norm has no rounding, in any order of the sum."""
    eight = torch.tensor([5.0, 2.0, 1.0, 1.0, 1.0, 0.0, -0.0, 0.0]).repeat(width // 8)
    order = torch.rand(count, width).argsort(dim=-1)
    signs = torch.randint(0, 2, (count, width)) * 2 - 1
    return eight[order] * signs


def quarter_turns(count, pairs, device):
    return torch.tensor([1, 1j, -1, -1j], device=device)[torch.randint(0, 4, (count, pairs))]


def launched(launch, form, latents, weight, table, *, spare=3):
    device, (count, width) = latents.device, latents.shape
    stored = torch.full(
        (count + spare, columns(form, width)), 0xA5, dtype=torch.uint8, device=device
    )
    places = torch.randperm(count + spare)[:count].to(device)
    want = stored.clone()
    values = launch.run(stored, places, latents, weight, NORM_EPS, table, form)
    args = (want, places, latents, weight, NORM_EPS, table, form)
    return (stored, values), (want, write_latents.reference(*args))


@each_form
@each_dtype
@pytest.mark.parametrize(
    ("count", "width", "pairs"), [(1, 64, 8), (3, 16, 4), (4, 32, 16), (5, 128, 32), (9, 512, 32)]
)
def test_bytes_without_norm_and_rotation_are_those_of_the_reference(
    launch, device, form, dtype, count, width, pairs
):
    latents = torch.randn(count, width) * torch.exp2(torch.randint(-30, 30, (count, 1)).float())
    latents[::3] = torch.randint(-26, 27, latents[::3].shape) * 0.25  # ties
    latents[1::4, ::5] = -0.0
    latents[-1, : width // 2] = 0.0
    latents = latents.to(device, dtype)
    got, want = launched(launch, form, latents, None, still(count, pairs, device))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1].view(torch.uint8), want[1].view(torch.uint8))


@each_form
@each_dtype
def test_bytes_after_an_exact_norm_and_rotation_are_those_of_the_reference(
    launch, device, form, dtype
):
    latents = exact_rows(6, 128).to(device, dtype)
    weight = (1 + 0.2 * torch.randn(128)).to(device, dtype)
    turns = quarter_turns(6, 32, device)
    got, want = launched(launch, form, latents, weight, turns)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert not torch.equal(got[1], launched(launch, form, latents, weight, -turns)[0][1])


@each_form
@each_dtype
@pytest.mark.parametrize(
    ("count", "width"),
    [(1, 128), (7, 512), pytest.param(8192, 512, marks=pytest.mark.gpu)],
)
def test_values_differ_from_the_reference_by_a_rounding_at_most(
    launch, device, form, dtype, count, width
):
    latents = (torch.randn(count, width) * 3).to(device, dtype)
    weight = (1 + 0.1 * torch.randn(width)).to(device, dtype)
    got, want = launched(launch, form, latents, weight, table_of(count, 32, device))
    differs = got[1] != want[1]
    assert differs.float().mean() < 2e-3  # an operation rounds differently, then an element
    step = want[1].float().abs().clamp(min=0.5) * (0.13 if form == "fp8" else 0.51)
    assert ((got[1].float() - want[1].float()).abs() <= step).all()
    stored_differ = (got[0] != want[0]).float().mean()
    assert stored_differ < 4e-3


@each_form
def test_what_is_stored_is_what_is_returned(launch, device, form):
    latents = torch.randn(5, 128).to(device, torch.bfloat16)
    weight = torch.rand(128).to(device, torch.bfloat16)
    (stored, values), _ = launched(launch, form, latents, weight, table_of(5, 32, device), spare=0)
    blocks = 128 // (16 if form == "fp4_e4m3" else 32)
    codes, scales = stored[:, :-blocks], stored[:, -blocks:]
    kinds = {
        "fp8": (torch.float8_e4m3fn, torch.float8_e8m0fnu),
        "fp4_e4m3": (torch.uint8, torch.float8_e4m3fn),
        "mxfp4": (torch.uint8, torch.float8_e8m0fnu),
    }[form]
    codes, scales = (p.contiguous().view(k) for p, k in zip((codes, scales), kinds, strict=True))
    back = QUANTIZERS[form][1](codes, scales, torch.bfloat16)
    assert set(map(tuple, back.tolist())) == set(map(tuple, values.tolist()))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's numpy
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@each_form
def test_rows_that_are_not_finite(launch, device, form):
    latents = torch.randn(6, 64, device=device)
    latents[0, 3], latents[1, 40], latents[2, 63] = torch.nan, torch.inf, -torch.inf
    latents[3] = torch.nan
    latents[4] = 3e38
    got, want = launched(launch, form, latents, None, still(6, 8, device))
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=0, equal_nan=True)
    assert got[1].isnan().any()


@each_form
def test_a_negative_place_stores_nothing_and_every_value_is_returned(launch, device, form):
    latents = torch.randn(4, 64, device=device)
    stored = torch.full((3, columns(form, 64)), 0xA5, dtype=torch.uint8, device=device)
    places = torch.tensor([2, -1, 0, -1], device=device)
    args = (latents, None, NORM_EPS, still(4, 8, device), form)
    want = stored.clone()
    values = launch.run(stored, places, *args)
    assert torch.equal(values, write_latents.reference(want, places, *args))
    assert torch.equal(stored, want)
    assert (stored[1] == 0xA5).all()


@each_form
def test_views_and_no_rows(launch, device, form):
    wide = torch.randn(5, 256, device=device)
    table = table_of(5, 32, device)
    weight = torch.rand(256, device=device)[::2]
    got, want = launched(launch, form, wide[:, 64:192], weight, table)
    assert torch.equal(got[0], want[0])
    pages = torch.zeros(5, 2, columns(form, 128), dtype=torch.uint8, device=device)
    places = torch.arange(5, device=device)
    args = (places, wide[:, 64:192], weight, NORM_EPS, table, form)
    launch.run(pages[:, 1], *args)
    write_latents.reference(flat := torch.zeros_like(pages[:, 1]), *args)
    assert not pages[:, 0].any()
    assert torch.equal(pages[:, 1], flat)
    empty, _ = launched(launch, form, wide[:0, :128], weight, table[:0])
    assert empty[1].shape == (0, 128)


@each_form
def test_what_the_kernel_refuses(launch, form):
    def reason(width=128, dtype=torch.float32, **keywords):
        x = torch.zeros(2, width, dtype=dtype)
        stored = torch.zeros(2, columns(form, width), dtype=torch.uint8)
        places = torch.arange(2)
        return launch.refuse(
            stored, places, x, None, NORM_EPS, still(2, 8, "cpu"), form, **keywords
        )

    assert reason() is None
    assert "96" in reason(width=96)
    assert "float64" in reason(dtype=torch.float64)
    assert "deterministic" in reason(deterministic=True)
    assert ROW_BYTES[form][1] == columns(form, ROW_BYTES[form][0])
