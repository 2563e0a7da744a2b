"""One routing bias for all tokens against one per modality: load balance. Report §2.1.1.

Trains ``tiny`` on the demo's text and pictures with three seeds each way, and writes the balance of
text and image tokens over the last quarter of the steps.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import record
from benchmarks.tiny_runs import tiny_run
from openv41.train.loop import Trainer
from openv41.train.metrics import StepRecord

SEEDS = (0, 1, 2)
SETTINGS = {
    "tokens": 196_608,
    "batch_tokens": 1024,
    "sequence_length": 128,
    "image_share": 0.5,
    "warmup_tokens": 20_000,
    "optimizer.lr": 3e-3,
    "optimizer.matrix_update": "adamw",
    "optimizer.token_update": "adamw",
    "optimizer.token_lr_factor": 6.0,
    "optimizer.vision_lr_factor": 1.0,
    "decay": "linear",
    "balance_loss": 0.0,  # the biases alone are compared
    "indexer_loss": 0.0,
    "restrict_candidates": "true",
    "checkpoint_steps": 1_000_000,
}


def train(data: Path, images: Path, seed: int, *, modality_biases: bool) -> list[StepRecord]:
    """Train once; returns the records of all steps."""
    values = {**SETTINGS, "seed": seed, "modality_biases": str(modality_biases).lower()}
    records: list[StepRecord] = []
    with tempfile.TemporaryDirectory() as folder:
        run = tiny_run(values, Path(folder) / "run", data=data, images=images)
        Trainer(run, resume=False).fit(records.append)
    return records


def figures(records: list[StepRecord]) -> dict[str, Any]:
    """Means over layers and the last quarter of the steps; the worst layer beside them."""
    last = records[-len(records) // 4 :]
    found: dict[str, Any] = {"steps": len(records), "last_steps": len(last)}
    found["loss"] = statistics.fmean(r.loss for r in last)
    for kind in ("text", "image"):
        worst = [r.balance[kind].max_over_mean for r in last]
        entropy = [r.balance[kind].entropy for r in last]
        by_layer = [statistics.fmean(layer) for layer in zip(*worst, strict=True)]
        found[f"{kind}_max_over_mean"] = statistics.fmean(by_layer)
        found[f"{kind}_max_over_mean_worst_layer"] = max(by_layer)
        found[f"{kind}_entropy"] = statistics.fmean(v for layers in entropy for v in layers)
    return found


def lines(data: Path, images: Path, seeds: list[int]) -> Iterator[dict[str, Any]]:
    """One line per run."""
    for seed in seeds:
        for modality_biases in (True, False):
            records = train(data, images, seed, modality_biases=modality_biases)
            bias = "one per modality" if modality_biases else "one for all"
            yield {"bias": bias, "seed": seed, **figures(records)}


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.modality_balance")
    parser.add_argument("--data", type=Path, default=Path("runs/demo/data/train"))
    parser.add_argument("--images", type=Path, default=Path("runs/demo/data/pictures"))
    parser.add_argument("--seed", type=int, action="append", help="one of several; default 0 1 2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record("modality_balance", lines(options.data, options.images, options.seed or list(SEEDS)))


if __name__ == "__main__":
    main()
