"""Update rules side by side: head-wise Muon, Muon, AdamW; Sinkhorn against AdamW. Report §2.5.

Trains ``tiny`` on the demo's text, equal tokens and three seeds for each, and writes the held-out
score and how far apart the sizes of the query heads' updates are. Each rule has a learning rate of
its own, chosen by hand.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import record
from benchmarks.tiny_runs import tiny_run
from openv41.train.loop import Trainer
from openv41.train.metrics import StepRecord

SEEDS = (0, 1, 2)
SETTINGS = {
    "batch_tokens": 1024,
    "sequence_length": 128,
    "warmup_tokens": 10_000,
    "optimizer.lr": 2e-2,
    "optimizer.token_lr_factor": 3.0,
    "optimizer.engram_table_lr_factor": 0.5,
    "optimizer.sinkhorn_threshold": 0.1,
    "heldout_tokens": 32_768,
    "heldout_steps": 1_000_000,
    "checkpoint_steps": 1_000_000,
    "update_rms_steps": 0,
}
ARMS: dict[tuple[str, str], dict[str, Any]] = {  # of matrices, of tokens and n-gram tables
    ("head-wise Muon", "Sinkhorn"): {},
    ("Muon", "Sinkhorn"): {"optimizer.head_wise": "false"},
    ("AdamW", "Sinkhorn"): {  # the rates of the token rows stay the same
        "optimizer.matrix_update": "adamw",
        "optimizer.lr": 3e-3,
        "optimizer.token_lr_factor": 20.0,
        "optimizer.engram_table_lr_factor": 3.3,
    },
    ("head-wise Muon", "AdamW"): {
        "optimizer.token_update": "adamw",
        "optimizer.token_lr_factor": 1.0,
        "optimizer.engram_table_lr_factor": 1.0,
    },
}


def train(data: Path, heldout: Path, values: dict[str, Any]) -> tuple[list[StepRecord], float]:
    """Train once; returns the records and the spread of the heads' last step."""
    records: list[StepRecord] = []
    with tempfile.TemporaryDirectory() as folder:
        run = tiny_run(values, Path(folder) / "run", data=data, heldout=heldout)
        trainer = Trainer(run, resume=False)
        start = head_weights(trainer)
        trainer.fit(records.append)
        moved = [after - before for before, after in zip(start, head_weights(trainer), strict=True)]
    return records, statistics.fmean(spread(weight) for weight in moved)


def head_weights(trainer: Trainer) -> list[torch.Tensor]:
    """Query weights of each layer, by heads."""
    heads = trainer.run.model.attention.num_heads
    names = [n for n, _ in trainer.model.named_parameters() if n.endswith("attention.wq_b.weight")]
    weights = (trainer.model.get_parameter(name).detach().clone() for name in names)
    return [weight.unflatten(0, (heads, -1)) for weight in weights]


def spread(heads: torch.Tensor) -> float:
    """How much farther the head that moved most has moved than the one that moved least."""
    sizes = heads.flatten(1).square().mean(dim=1).sqrt()
    return float(sizes.max() / sizes.min())


def measure(options: argparse.Namespace, arm: tuple[str, str], seed: int) -> dict[str, Any]:
    """The line of one run."""
    torch.set_num_threads(1)
    values = {**SETTINGS, **ARMS[arm], "seed": seed, "tokens": options.tokens}
    records, head_spread = train(options.data, options.heldout, values)
    last = records[-len(records) // 8 :]
    return {
        "matrices": arm[0],
        "token rows": arm[1],
        "seed": seed,
        "steps": len(records),
        "tokens": records[-1].tokens,
        "loss": statistics.fmean(r.loss for r in last),
        "heldout_bits_per_byte": records[-1].heldout_bits_per_byte,
        "head_spread": head_spread,
        "tokens_per_second": statistics.median(r.tokens_per_second for r in records),
    }


def lines(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One line per run."""
    with ProcessPoolExecutor(options.processes) as pool:
        started = [
            pool.submit(measure, options, arm, seed)
            for seed in options.seed or SEEDS
            for arm in ARMS
        ]
        yield from (run.result() for run in started)


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.update_rules")
    parser.add_argument("--data", type=Path, default=Path("runs/demo/data/train"))
    parser.add_argument("--heldout", type=Path, default=Path("runs/demo/data/heldout"))
    parser.add_argument("--tokens", type=int, default=98_304, help="of each run")
    parser.add_argument("--seed", type=int, action="append", help="one of several; default 0 1 2")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, of one thread")
    torch.set_num_threads(1)
    record("update_rules", lines(parser.parse_args()))


if __name__ == "__main__":
    main()
