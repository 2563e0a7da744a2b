"""What one process computes, and what two must compute together: run alone or by torchrun."""

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from openv41.train import muon
from openv41.train.checkpoint import state_tensors
from openv41.train.config import DraftConfig, OptimizerConfig, TrainConfig
from openv41.train.draft_step import draft_step
from openv41.train.evaluate import HeldOutImages
from openv41.train.optimizer import Optimizers
from openv41.train.packed_batch import PackedBatch
from openv41.train.placement import distribute
from openv41.train.processes import join
from openv41.train.sample_encoder import EncodedSample
from openv41.train.sample_shards import SampleShards
from openv41.train.sharded_checkpoint import as_distributed
from openv41.train.step import train_step
from tests.layers.mini import mini_config, mini_model, random_ids
from tests.model.drafting import drafting_model
from tests.model.image_mini import GRIDS, VISION, image_ids

LENGTHS = (5, 9, 1, 14, 3, 8)
STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and settings."""

    experts: str = "sharded"
    micro_batch_tokens: int = 0
    recompute: bool = False
    adamw: bool = False
    images: bool = False
    lopsided: bool = False  # no token chooses the first half of the experts
    drafts: str = ""  # a drafter learns "alone", or "beside" the model in the first step alone
    values_at_once: int = muon.VALUES_AT_ONCE
    lengths: tuple[int, ...] = LENGTHS

    def model(self):
        if self.drafts:
            return drafting_model(num_stages=1)
        config = mini_config()
        if self.experts == "parallel":  # five cannot be shared evenly
            config = replace(config, moe=replace(config.moe, num_experts=6))
        if self.images:
            config = replace(config, vision=VISION)
        model = mini_model(3, torch.float64, config=config)
        if self.lopsided:
            for layer in model.layers:
                layer.moe.gate.bias.data[:3] = -100
        return model

    def config(self, size):
        update = {"matrix_update": "adamw", "token_update": "adamw"} if self.adamw else {}
        return TrainConfig(
            tokens=10 * size,
            batch_tokens=size,
            sequence_length=size,
            warmup_tokens=0,
            micro_batch_tokens=self.micro_batch_tokens,
            activation_checkpointing=self.recompute,
            update_rms_steps=2,
            balance_loss=0.1,
            indexer_loss=0.1,
            optimizer=OptimizerConfig(lr=0.01, **update),
            draft=DraftConfig(weight=float(bool(self.drafts)), anchors=3, decay=2.0),
        )

    def take(self, step):
        is_beside = self.drafts == "beside" and step == 0
        return draft_step if self.drafts and not is_beside else train_step

    def batch(self, step):
        ids = torch.tensor(random_ids(sum(self.lengths), seed=step))
        packed = PackedBatch(ids, self.lengths)
        if not self.images:
            return packed
        size, patches = VISION.patch_size, sum(grid.num_patches for grid in GRIDS)
        pixels = torch.arange(patches * 3 * size * size).remainder(251).to(torch.uint8)
        seen = image_ids()
        return packed.beside(
            PackedBatch(
                torch.tensor(seen),
                (len(seen),),
                pixels=pixels.view(patches, 3, size, size),
                grids=(tuple(GRIDS),),
            )
        )


CASES = {
    "sharded": Case(),
    "parallel": Case(experts="parallel"),
    "accumulated": Case(micro_batch_tokens=10),
    "recomputed": Case(experts="parallel", micro_batch_tokens=14, recompute=True),
    "adamw": Case(adamw=True),
    "images": Case(experts="parallel", images=True),
    "idle experts": Case(experts="parallel", lopsided=True),
    "small chunks": Case(values_at_once=120),
    "one document": Case(lengths=(21,), recompute=True),
    "drafter": Case(drafts="beside", micro_batch_tokens=20),
    "blocks in one process": Case(drafts="alone", lengths=(21, 1)),
}


class Watched(Optimizers):
    """Optimizers that keep the drafter's gradients of the last step."""

    def take_gradients(self):
        super().take_gradients()
        self.taken = {
            f"gradient of {placed.name}": placed.local.grad.clone()
            for placed in self.placement.parameters
            if placed.name.startswith("drafter.") and placed.local.grad is not None
        }


class Pictures(SampleShards):
    """Three samples of two images, so that one of two processes has more than the other."""

    def __init__(self):
        self.lengths = [30, 30, 30]

    def __len__(self):
        return len(self.lengths)

    def read(self, number):
        size, patches = VISION.patch_size, sum(grid.num_patches for grid in GRIDS)
        pixels = np.random.default_rng(number).integers(0, 256, (patches, 3, size, size), np.uint8)
        weights = (np.arange(30) > 20 + 2 * number).astype(np.float32)  # behind both images
        return EncodedSample(np.array(image_ids()), weights, pixels, tuple(GRIDS))


def score_images(model, processes):
    """Held-out score of a forward for each sample."""
    held = HeldOutImages(Pictures(), num_tokens=90, forward_tokens=30)
    return held.score(model, processes)


def run_case(case, processes):
    """Figures of some steps, every parameter and buffer, whole, and a score of images."""
    muon.VALUES_AT_ONCE = case.values_at_once
    model = case.model().to(processes.device)
    placement = distribute(model, processes, case.experts)
    batches = [case.batch(step) for step in range(STEPS)]
    config = case.config(len(batches[0].ids))
    optimizer = Watched(placement, config.optimizer)
    results = [
        case.take(step)(model, optimizer, packed, config, step)
        for step, packed in enumerate(batches)
    ]
    tensors = as_distributed(state_tensors(optimizer), placement)
    whole = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in tensors.items()}
    whole.pop("rng")
    whole |= optimizer.taken
    score = score_images(model, processes) if case.images else None
    return [asdict(result) for result in results], {k: v.cpu() for k, v in whole.items()}, score


def main(out, device="cpu"):
    with join(torch.device(device)) as processes:
        for name, case in CASES.items():
            found = run_case(case, processes)
            if processes.is_first:
                torch.save(found, out / f"{name}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *sys.argv[2:])
