"""What devices can do, and what a contrastive step costs."""

import pytest
import torch

from openv41.model.training_flops import block_flops, encoder_flops
from openv41.train.utilisation import FlopCounter, peak_flops
from tests.train.digit_pairs import VISION, digit_model, digits


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA H20", None),
        ("Some other card", None),
    ],
)
def test_peaks_by_name(name, peak):
    assert peak_flops(name) == peak


def test_a_contrastive_step_costs_both_towers():
    packed = digits([0, 1, 2])
    counter = FlopCounter(digit_model(), torch.device("cpu"))
    assert counter.peak is None
    want = encoder_flops(VISION, packed.images) + block_flops(VISION, [2, 3, 2])
    assert counter.step(packed, num_targets=3, encoder_learns=True) == 3 * want
