"""How much of a device a run uses: model FLOPs per second, and their share of what it can do."""

import torch

from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.training_flops import PASSES, TrainingFlops, block_flops, encoder_flops
from openv41.train.contrastive import Pairs
from openv41.train.packed_batch import PackedBatch
from openv41.train.placement import StageModel

# Dense bfloat16 products per second and device, by a part of its name; the first that fits counts.
PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
}


def peak_flops(device_name: str) -> float | None:
    """What a device of this name can do; None where that is not known."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in device_name), None)


class FlopCounter:
    """Counts the model FLOPs of a stage's steps; see model/training_flops.py for how.

    A run with LoRA counts as one that trains the whole model, and teachers count for nothing.
    """

    def __init__(self, model: StageModel, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.peak = peak_flops(torch.cuda.get_device_name(device)) if is_cuda else None
        self._training: TrainingFlops | None = None
        if isinstance(model, CausalEncoderDecoder):  # without its adapter
            self._training = TrainingFlops(CausalEncoderDecoder(model.config, device="meta"))
        self._vision = model.config.vision

    def share(self, flops_per_second: float, devices: int) -> float | None:
        """Share of what all devices can do; None where that is not known."""
        return None if self.peak is None else flops_per_second / (self.peak * devices)

    def step(self, packed: PackedBatch, *, num_targets: int, encoder_learns: bool) -> int:
        """Model FLOPs of one step."""
        if self._training is not None:
            return self._training.step(
                packed.lengths,
                num_targets=num_targets,
                grids=packed.images,
                encoder_learns=encoder_learns,
            )
        assert self._vision is not None, "a contrastive model without a vision encoder"
        texts = block_flops(self._vision, Pairs.of(packed).lengths)
        return PASSES * (encoder_flops(self._vision, packed.images) + texts)
