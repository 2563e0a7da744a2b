"""Linear ops: the released products, rounding of the input, rows that do not see each other."""

import pytest
import torch
from safetensors.torch import load_file

from openv41 import ops
from openv41.ops import quantize
from tests.close import assert_close
from tests.oracles import formats


@pytest.mark.golden
@pytest.mark.parametrize("rounding", ["fake", "exact"])
@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_golden_products(golden_dir, form, rounding):
    stored = load_file(golden_dir / "ops" / "ops.safetensors")
    codes, scales = stored[f"gemm.{form}_weight"], stored[f"gemm.{form}_scale"]
    if form == "fp8":
        weight = quantize.dequantize_fp8_tiles(codes, scales)
    else:
        weight = quantize.dequantize_fp4_rows(codes.view(torch.uint8), scales)
    want = stored[f"gemm.{form}_out"]
    got = ops.quantized_linear(stored["gemm.x"], weight, rounding)
    apart = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    assert apart.max() <= 1, "more than one bfloat16 step apart"
    plain = ops.quantized_linear(stored["gemm.x"], weight, "off")
    assert (plain != want).float().mean() > 0.5, "rounding the input must be visible"


@pytest.mark.parametrize("rounding", ["off", "fake", "exact"])
@pytest.mark.parametrize(("T", "D", "F"), [(0, 4, 3), (1, 1, 1), (63, 33, 5), (129, 40, 7)])
def test_matches_oracle(T, D, F, rounding):
    x, weight = torch.randn(T, D), torch.randn(F, D)
    rows = x.double().numpy()
    if rounding != "off":
        rows = [formats.fake_fp8(row) for row in rows]
    want = torch.tensor([[float(row @ w) for w in weight.double().numpy()] for row in rows])
    got = ops.quantized_linear(x, weight, rounding)
    assert_close("linear", got, want.view(T, F), ulps=4, terms=D)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 127, 129])
def test_rows_are_independent_when_deterministic(T, dtype):
    x, weight = torch.randn(T, 96).to(dtype), torch.randn(40, 96).to(dtype)
    whole = ops.linear(x, weight, deterministic=True)
    for row in {0, T // 2, T - 1}:
        alone = ops.linear(x[row : row + 1], weight, deterministic=True)
        assert torch.equal(alone[0], whole[row])
    assert_close("value", whole, ops.linear(x, weight), ulps=4, terms=8)


def test_leading_dims_and_empty_rows():
    weight = torch.randn(5, 4)
    x = torch.randn(2, 3, 4)
    want = ops.linear(x, weight)
    assert want.shape == (2, 3, 5)
    assert_close("tiles", ops.linear(x, weight, deterministic=True), want, ulps=8)
    assert ops.linear(torch.zeros(0, 4), weight, deterministic=True).shape == (0, 5)


def test_fake_rounding_is_straight_through():
    x = torch.randn(3, 32, requires_grad=True)
    weight = torch.randn(4, 32, requires_grad=True)
    out = ops.quantized_linear(x, weight, "fake")
    grad = torch.randn_like(out)
    out.backward(grad)
    assert_close("x", x.grad, grad @ weight.detach(), ulps=8)
    rounded = quantize.fake_fp8(x.detach())
    assert (rounded != x.detach()).any()
    assert_close("weight", weight.grad, grad.T @ rounded, ulps=8)


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradcheck(deterministic):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, w: ops.linear(x, w, deterministic=deterministic), (x, weight)
    )
