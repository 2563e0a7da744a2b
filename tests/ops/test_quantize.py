"""Quantisers, report §2.4.4: exhaustive formats, golden bytes, edge vectors, lossless weights."""

import math

import numpy as np
import pytest
import torch
from safetensors import safe_open

from openv41.ops import quantize as q
from tests.oracles import formats

ACTIVATIONS = {
    "fp8": (q.quantize_fp8, q.dequantize_fp8, q.fake_fp8, formats.fake_fp8),
    "mxfp4": (q.quantize_mxfp4, q.dequantize_mxfp4, q.fake_mxfp4, formats.fake_mxfp4),
    "fp4_e4m3": (
        q.quantize_fp4_e4m3,
        q.dequantize_fp4_e4m3,
        q.fake_fp4_e4m3,
        formats.fake_fp4_e4m3,
    ),
}
GOLDEN_NAMES = {"fp8": "fp8_ue8m0_b32", "mxfp4": "fp4_ue8m0_b32", "fp4_e4m3": "fp4_e4m3_b16"}
each_format = pytest.mark.parametrize("name", ACTIVATIONS)


def raw(tensor):
    """Bytes of a tensor, so that NaN, signs of zero and codes compare."""
    return tensor.contiguous().view(torch.uint8)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def hard_rows(count, width=64):
    """Random rows over 80 binades, a third of them on ties of a grid, some with zeros and -0."""
    x = torch.randn(count, width) * torch.exp2(torch.randint(-40, 40, (count, 1)).float())
    x[::3] = torch.randint(-26, 27, x[::3].shape) * 0.25 * torch.exp2(x[::3, :1].frexp().exponent)
    x[1::7] = x[1::7] * (torch.rand(x[1::7].shape) > 0.5)
    x[2::5, ::2] = -0.0
    return x


@pytest.mark.golden
@each_format
def test_golden_codes_scales_and_values(golden_dir, name):
    with safe_open(golden_dir / "ops" / "ops.safetensors", "pt") as file:
        golden = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    quantize, dequantize, fake, _ = ACTIVATIONS[name]
    prefix, x = GOLDEN_NAMES[name], golden["x"]
    codes, scales = quantize(x)
    assert same_bits(codes, golden[f"{prefix}.{'codes' if name == 'fp8' else 'packed'}"])
    assert same_bits(scales, golden[f"{prefix}.scales"])
    assert same_bits(dequantize(codes, scales, torch.bfloat16), golden[f"{prefix}.dequant"])
    assert same_bits(fake(x), golden[f"{prefix}.dequant"])


@each_format
@pytest.mark.parametrize("width", [1, 31, 32, 33, 80])
def test_matches_the_loop_oracle(name, width):
    fake, oracle = ACTIVATIONS[name][2:]
    x = hard_rows(24, width)
    want = torch.tensor(np.stack([oracle(row) for row in x.double().numpy()]))
    assert same_bits(fake(x).double(), want)
    assert torch.equal(fake(x.double()), want)


@each_format
@pytest.mark.parametrize(
    ("dtype", "rows"), [(torch.float32, 100_000), (torch.bfloat16, 10_000), (torch.float64, 10_000)]
)
def test_unpacked_equals_fake(name, dtype, rows):
    quantize, dequantize, fake, _ = ACTIVATIONS[name]
    for x in hard_rows(rows, 32).to(dtype).split(10_000):
        assert same_bits(dequantize(*quantize(x), dtype), fake(x))


@pytest.mark.prove
@each_format
def test_unpacked_equals_fake_for_a_million_rows(name, record_proof):
    quantize, dequantize, fake, _ = ACTIVATIONS[name]
    differing = 0
    for _ in range(50):
        x = hard_rows(20_000, 32)
        differing += int((raw(dequantize(*quantize(x))) != raw(fake(x))).any(-1).sum())
    record_proof(rows=1_000_000, differing_rows=differing)
    assert differing == 0


def test_all_fp8_codes():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    scales = torch.full((256, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    values = q.dequantize_fp8(codes, scales).squeeze(-1)
    want = torch.from_numpy(formats.E4M3_TABLE).float()
    torch.testing.assert_close(values, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(values.signbit(), torch.arange(256) >= 128)


def test_all_scale_bytes():
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)[:, None]
    one = torch.ones(256, 1).to(torch.float8_e4m3fn)
    values = q.dequantize_fp8(one, scales, torch.float64).squeeze(-1)
    assert values[:255].tolist() == [math.ldexp(1.0, byte - 127) for byte in range(255)]
    assert values[255].isnan()


def test_all_fp4_codes_and_nibble_order():
    packed = torch.arange(256, dtype=torch.uint8)[:, None]
    values = q.unpack_e2m1(packed)
    for byte, (low, high) in enumerate(values.tolist()):
        for value, code in ((low, byte & 15), (high, byte >> 4)):
            want = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code & 7]
            assert abs(value) == want
            assert (math.copysign(1, value) < 0) == (code >= 8)
    assert torch.equal(q.pack_e2m1(values), packed)


@pytest.mark.parametrize(
    ("tie", "even"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)],
)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("fake", [q.fake_mxfp4, q.fake_fp4_e4m3])
def test_fp4_midpoints_go_to_the_even_code(fake, tie, even, sign):
    x = torch.zeros(16, dtype=torch.float64)
    x[0], x[1] = 6.0, sign * tie
    x[2], x[3] = sign * math.nextafter(tie, 0), sign * math.nextafter(tie, 9)
    got = fake(x)
    assert got[1] == sign * even
    assert (got[2] * sign, got[3] * sign) != (even, even)  # the neighbours part at the tie
    assert got[1].signbit() == (sign < 0)


def test_fp8_midpoints_go_to_the_even_code():
    grid = formats.E4M3_TABLE[:127]
    middles = torch.tensor((grid[:-1] + grid[1:]) / 2)
    x = torch.cat([middles, torch.tensor([448.0])]).view(-1, 1)
    x = torch.cat([x, torch.full_like(x, 448.0)], dim=-1)  # scale 1 everywhere
    got = q.fake_fp8(x)[:-1, 0]
    even = torch.tensor([grid[i if i % 2 == 0 else i + 1] for i in range(126)])
    assert torch.equal(got, even)


@pytest.mark.parametrize(
    ("name", "peak", "byte"),
    [
        ("mxfp4", 6.0, 127),
        ("mxfp4", math.nextafter(6.0, 9) + 1e-6, 128),
        ("mxfp4", 6.0 * 2**-30, 97),
        ("mxfp4", 3.0, 126),
        ("mxfp4", 0.0, 1),
        ("mxfp4", 1e-45, 1),
        ("mxfp4", 1e-12, 85),
        ("mxfp4", 3.4028234663852886e38, 253),
        ("fp8", 448.0, 127),
        ("fp8", 448.0001, 128),
        ("fp8", 0.0, 105),
        ("fp8", 1e-12, 105),
        ("fp8", 3.4028234663852886e38, 247),
    ],
)
def test_power_of_two_scale_is_rounded_up(name, peak, byte):
    x = torch.zeros(32, dtype=torch.float32)
    x[5] = -peak
    scales = ACTIVATIONS[name][0](x)[1]
    assert raw(scales).tolist() == [byte]


@pytest.mark.parametrize(
    ("peak", "scale", "value"),
    [
        (0.0, 2.0**-9, 0.0),
        (1e-12, 2.0**-9, 0.0),
        (6 * 2.0**-9, 2.0**-9, 6 * 2.0**-9),
        (6.0, 1.0, 6.0),
        (6.25, 1.0, 6.0),
        (6.375, 1.0, 6.0),  # 1.0625 is a tie between 1 and 1.125
        (6.4, 1.125, 6.75),
        (2688.0, 448.0, 2688.0),
        (2700.0, 448.0, 2688.0),
        (math.inf, 448.0, 2688.0),
    ],
)
def test_main_kv_scale_and_saturation(peak, scale, value):
    x = torch.zeros(16)
    x[3] = peak
    packed, scales = q.quantize_fp4_e4m3(x)
    assert scales.float().tolist() == [scale]
    assert q.dequantize_fp4_e4m3(packed, scales)[3] == value
    assert q.fake_fp4_e4m3(-x)[3] == -value


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("fp8", math.nan),
        ("fp8", math.inf),
        ("mxfp4", math.nan),
        ("mxfp4", -math.inf),
        ("fp4_e4m3", math.nan),
    ],
)
def test_a_block_that_cannot_be_scaled_is_nan_and_no_other(name, bad):
    quantize, dequantize, fake, _ = ACTIVATIONS[name]
    x = torch.ones(2, 64)
    x[1, 40] = bad
    got, block = fake(x), 16 if name == "fp4_e4m3" else 32
    start = 40 // block * block
    assert got[1, start : start + block].isnan().all()
    assert got.isnan().sum() == block
    assert torch.equal(got.isnan(), dequantize(*quantize(x)).isnan())


@each_format
def test_sign_of_zero_is_kept(name):
    x = torch.tensor([0.0, -0.0, 1e-30, -1e-30] * 8)
    quantize, dequantize, fake, _ = ACTIVATIONS[name]
    for got in (fake(x), dequantize(*quantize(x))):
        assert torch.equal(got.signbit(), torch.tensor([False, True] * 16))


@each_format
def test_gradient_passes_straight_through(name):
    x = (torch.randn(4, 48, dtype=torch.float64) * 100).requires_grad_()
    weight = torch.randn_like(x)
    got = ACTIVATIONS[name][2](x)
    (got * weight).sum().backward()
    assert got.dtype == torch.float64
    assert not torch.equal(got, x)
    assert torch.equal(x.grad, weight)


def test_expert_weights_round_to_what_packing_gives():
    tiny = torch.tensor([[5.0, 0.5] * 32]) * 2.0**-127  # below the floor of activations
    w = torch.cat([hard_rows(40), torch.zeros(1, 64), tiny])
    assert same_bits(q.fake_fp4_rows(w), q.dequantize_fp4_rows(*q.quantize_fp4_rows(w)))
    leaf = w.clone().requires_grad_()
    (q.fake_fp4_rows(leaf) * w).sum().backward()
    assert torch.equal(leaf.grad, w)


def test_no_gradient_where_main_kv_saturates():
    x = torch.tensor([1.0, 2700.0, -2688.0, -5000.0], requires_grad=True)
    q.fake_fp4_e4m3(x).sum().backward()
    assert x.grad.tolist() == [1.0, 0.0, 1.0, 0.0]


@each_format
def test_input_is_left_alone(name):
    x = torch.randn(3, 64) * 1000
    before = x.clone()
    ACTIVATIONS[name][0](x)
    ACTIVATIONS[name][2](x)
    assert torch.equal(x, before)


@each_format
def test_empty_input(name):
    quantize, dequantize, fake, _ = ACTIVATIONS[name]
    x = torch.empty(0, 64)
    assert dequantize(*quantize(x)).shape == fake(x).shape == (0, 64)


def random_codes(*shape):
    """Every E4M3 code but the two NaNs."""
    codes = torch.randint(0, 254, shape, dtype=torch.uint8)
    return (codes + (codes >= 127)).view(torch.float8_e4m3fn)


def random_scales(*shape, low=0, high=246):
    return torch.randint(low, high + 1, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)


@pytest.mark.parametrize(("out", "width"), [(32, 32), (70, 100), (33, 1), (1, 64), (96, 160)])
def test_tiles_go_back_in_unchanged(out, width):
    for _ in range(20):
        codes, scales = random_codes(out, width), random_scales(-(-out // 32), -(-width // 32))
        value = q.dequantize_fp8_tiles(codes, scales)
        want = formats.dequantize_tiles(raw(codes).numpy(), raw(scales).numpy())
        assert torch.equal(value.double(), torch.from_numpy(want))
        again = q.dequantize_fp8_tiles(*q.quantize_fp8_tiles(value))
        assert same_bits(again, value)


@pytest.mark.parametrize("low_codes", [False, True])
def test_rows_go_back_in_unchanged(low_codes):
    for _ in range(20):
        codes, scales = random_codes(40, 96), random_scales(40, 3)
        if low_codes:  # blocks that do not use their range, down to the smallest subnormal
            codes = (raw(codes) & 0x83).view(torch.float8_e4m3fn)
        value = q.dequantize_fp8_rows(codes, scales)
        want = formats.dequantize_rows(formats.E4M3_TABLE[raw(codes).numpy()], raw(scales).numpy())
        assert torch.equal(value.double(), torch.from_numpy(want))
        assert same_bits(q.dequantize_fp8_rows(*q.quantize_fp8_rows(value)), value)
        packed = torch.randint(0, 256, (40, 48), dtype=torch.uint8)
        scales = random_scales(40, 3, high=251)
        value = q.dequantize_fp4_rows(packed, scales)
        want = formats.dequantize_rows(formats.unpack_e2m1(packed.numpy()), raw(scales).numpy())
        assert torch.equal(value.double(), torch.from_numpy(want))
        assert same_bits(q.dequantize_fp4_rows(*q.quantize_fp4_rows(value)), value)


def test_every_scale_byte_goes_back_in_unchanged():
    scales = torch.arange(247, dtype=torch.uint8).view(torch.float8_e8m0fnu)[:, None]
    codes = random_codes(247, 32)
    codes[:, 0] = 448.0  # the block uses its range: codes and scale come back, not only values
    codes_again, scales_again = q.quantize_fp8_rows(q.dequantize_fp8_rows(codes, scales))
    assert same_bits(codes_again, codes)
    assert same_bits(scales_again, scales)


def test_one_outlier_tile_leaves_the_others_exact():
    w = torch.randn(96, 96)
    w[40, 70] = 1e6
    error = (q.dequantize_fp8_tiles(*q.quantize_fp8_tiles(w)) - w).abs()
    error[32:64, 64:96] = 0
    assert error.max() < 4 * 2**-4  # half a step of E4M3 at |w| < 4


def test_stacked_weights_equal_single_ones():
    w = torch.randn(3, 40, 64)
    codes, scales = q.quantize_fp8_tiles(w)
    packed, rows = q.quantize_fp4_rows(w)
    for i in range(3):
        assert all(map(same_bits, (codes[i], scales[i]), q.quantize_fp8_tiles(w[i])))
        assert all(map(same_bits, (packed[i], rows[i]), q.quantize_fp4_rows(w[i])))


def test_zero_weights_take_the_scale_of_the_floor():
    assert raw(q.quantize_fp8_tiles(torch.zeros(32, 32))[1]).item() == 105
    assert raw(q.quantize_fp4_rows(torch.zeros(1, 32))[1]).item() == 1


def test_odd_width_cannot_be_packed():
    with pytest.raises(AssertionError, match="the last dim is 5"):
        q.quantize_mxfp4(torch.zeros(2, 5))
