"""What is said of an image: its pixels again, and the experts of both kinds of token."""

import pytest
import torch
from PIL import Image

from openv41.errors import InputError
from openv41.io.image_processor import load_image, process_image
from openv41.io.inspect_image import inspect_image, restored_pixels
from openv41.io.tokenizer import TextTokenizer
from tests.engine.mini_engine import arm, see


class Words(TextTokenizer):
    """A tokenizer of a few fixed tokens."""

    def __init__(self):
        self.vocab_size = 64

    def encode(self, text):
        return [3 + len(word) for word in text.split()]


@pytest.fixture(scope="module")
def model():
    return see(arm(torch.float32, bitwise=False))


@pytest.fixture
def file(tmp_path):
    Image.radial_gradient("L").resize((9, 6)).convert("RGB").save(tmp_path / "a.png")
    return tmp_path / "a.png"


def test_pixels_come_back_as_they_were_fitted(model, tmp_path):
    noise = Image.effect_noise((12, 6), 90).convert("RGB")
    noise.save(tmp_path / "noise.png")
    found = restored_pixels(process_image(load_image(tmp_path / "noise.png"), model.config.vision))
    assert found.numpy().tobytes() == noise.tobytes()
    assert found.shape == (6, 12, 3)


def test_shares_are_of_the_choices_of_each_kind(model, file):
    found = inspect_image(model, Words(), file, "one two three four five six")
    layers, experts = model.config.num_layers, model.config.moe.num_experts
    assert found.text_share.shape == found.image_share.shape == (layers, experts)
    for share in (found.text_share, found.image_share):
        assert torch.allclose(share.sum(dim=1), torch.ones(layers, dtype=share.dtype))
    assert found.text_tokens == 7  # with BOS
    assert ((found.overlap >= 0) & (found.overlap <= 1)).all()
    with torch.no_grad():
        for layer in model.layers:
            kept = layer.moe.gate.bias.clone(), layer.moe.gate.bias_vl.clone()
            layer.moe.gate.bias.copy_(torch.tensor([9.0, 9, 0, 0, 0]))
            layer.moe.gate.bias_vl.copy_(torch.tensor([0.0, 0, 9, 9, 0]))
            layer.moe.gate.kept = kept
    try:
        apart = inspect_image(model, Words(), file, "one two")
    finally:
        with torch.no_grad():
            for layer in model.layers:
                layer.moe.gate.bias.copy_(layer.moe.gate.kept[0])
                layer.moe.gate.bias_vl.copy_(layer.moe.gate.kept[1])
    assert torch.equal(apart.overlap, torch.zeros(layers, dtype=torch.float64))
    assert torch.equal(apart.image_share[0], torch.tensor([0, 0, 0.5, 0.5, 0]).double())


def test_refusals(model, file):
    with pytest.raises(InputError, match="the text is empty"):
        inspect_image(model, Words(), file, " ")
    with pytest.raises(InputError, match="the model has no vision encoder"):
        inspect_image(arm(torch.float32, bitwise=False), Words(), file, "a")
