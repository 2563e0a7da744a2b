"""Smoke test on a CUDA device: the same model gives the same results there."""

import pytest
import torch

from openv41 import Batch, CausalEncoderDecoder, init_weights, preset
from openv41.config import NUMERICS
from openv41.image_grid import ImageGrid
from openv41.model.cache import DenseStore
from tests.close import assert_close

pytestmark = pytest.mark.gpu


def model_on(device, numerics="f32", dtype=torch.float32):
    config = preset("tiny")
    model = CausalEncoderDecoder(config, NUMERICS[numerics], dtype=torch.float32)
    init_weights(model, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # selections and gates that are far from ties
    model.set_token_map(torch.arange(config.vocab_size) % config.engram.compressed_vocab_size)
    return model.to(device=device, dtype=dtype)


@pytest.fixture
def ids():
    return torch.randint(4, 1024, (300,))  # 3 stands for images


@torch.no_grad()
def logits(model, ids, lengths):
    device = model.norm.weight.device
    return model.logits(model(Batch.packed(ids.to(device), lengths)).hidden).cpu()


@pytest.mark.parametrize("numerics", ["f32", "f32qat"])
def test_gpu_equals_cpu(ids, numerics):
    torch.backends.cuda.matmul.allow_tf32 = False
    want = logits(model_on("cpu", numerics), ids, [200, 100])
    got = logits(model_on("cuda", numerics), ids, [200, 100])
    if numerics == "f32":
        assert_close("logits", got, want, rtol=1e-3, atol=1e-3)
    else:  # a rounding may flip
        assert (got - want).abs().mean() < 0.02
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.98


@torch.no_grad()
def test_decode_equals_prefill_on_the_gpu(ids):
    model = model_on("cuda")
    want = logits(model, ids[:80], [80])
    store = DenseStore(model.config.compress_ratios)
    model(Batch(ids[:71].cuda(), (0,), (0,), (71,)), store)
    for position in range(71, 80):
        step = Batch(ids[position : position + 1].cuda(), (0,), (position,), (1,))
        got = model.logits(model(step, store).hidden)[0].cpu()
        assert_close(f"position {position}", got, want[position], rtol=1e-3, atol=1e-3)


def test_bfloat16_trains_and_keeps_its_islands(ids):
    model = model_on("cuda", dtype=torch.bfloat16)
    islands = {n for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert "layers.0.attn_mhc.fn" in islands
    assert "embed.weight" not in islands
    batch = Batch.packed(ids.cuda(), [200, 100])
    loss = torch.nn.functional.cross_entropy(model.logits(model(batch).hidden), batch.token_ids)
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.isfinite().all(), name
    assert model.layers[0].moe.shared.w1.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_images_on_the_gpu_equal_those_on_the_cpu(ids):
    torch.backends.cuda.matmul.allow_tf32 = False
    grids = [ImageGrid(7, 5, 3), ImageGrid(3, 11, 3)]
    patches = torch.rand(sum(g.num_patches for g in grids), 3, 14, 14) * 2 - 1
    ids[50 : 50 + sum(g.span_length for g in grids)] = preset("tiny").image_token_id
    found = {}
    for device in ("cpu", "cuda"):
        model = model_on(device)
        embeds = model.vision(patches.to(device), grids)
        batch = Batch.packed(ids.to(device), [200, 100], embeds)
        found[device] = embeds.cpu(), model.logits(model(batch).hidden).cpu()
    for name, got, want in zip(("spans", "logits"), found["cuda"], found["cpu"], strict=True):
        assert_close(name, got, want, rtol=1e-3, atol=1e-3)
