"""A model, its drafter and what drafts bring, in one go on one machine. Report §2.4.3.

    python -m benchmarks.dspark_small DATA HELDOUT --device cuda --commit HASH

``DATA`` is what 'openv41 data prepare' writes, ``HELDOUT`` a text. The preset and then a drafter
for it are trained, without checkpoints on the way; then the drafter is calibrated, steps are
profiled, a load trace is replayed, drafts are forced to hold (speculation.py), and engines with and
without speculation answer the same requests (dspark_speed.py). Lines are written as they are found,
so that a time limit leaves those before it.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from benchmarks import dspark_replay, dspark_speed, speculation
from benchmarks.record import RESULTS, commit_of, machine, record
from openv41.config import NUMERICS
from openv41.train.loop import Run, Trainer
from openv41.train.metrics import StepRecord
from openv41.train.recipes import configure

STAGES = ("pretrain", "dspark")
START = time.perf_counter()
FORCED_TOKENS = 61  # of an answer, 60 behind the first
Lines = Iterable[dict[str, object]]


class Unsaved(Trainer):
    """A run that nobody will go on with."""

    def save(self) -> None:
        """Write nothing."""


def settings(options: argparse.Namespace) -> Iterator[str]:
    """What a run of a minute needs: a high rate, no parts that pay later."""
    tokens, drafted = options.tokens, options.draft_tokens
    values = {
        "tokens": tokens,
        "seed": 1,
        "sequence_length": 512,
        "batch_tokens": 8192,
        "warmup_tokens": tokens // 20,
        "decay": "linear",
        "numerics": "bf16" if options.device == "cuda" else "f32",
        "optimizer.ns_dtype": "bfloat16",
        "optimizer.token_update": "adamw",
        "optimizer.lr": 6e-3,
        "optimizer.momentum": 0.8,
        "optimizer.weight_decay": 0.0,
        "optimizer.token_lr_factor": 0.3,
        "optimizer.engram_table_lr_factor": 2.0,
        "indexer_loss": 0.0,
        "balance_loss": 0.0,
        "restrict_candidates": "true",
        "update_rms_steps": 0,
        "dspark.tokens": drafted,
        "dspark.batch_tokens": 2048,
        "dspark.warmup_tokens": drafted // 25,
        "dspark.draft.anchors": 64,
        "dspark.optimizer.lr": 1e-2,
    }
    yield from (f"{key}={value}" for key, value in values.items())
    yield from options.set


def train(options: argparse.Namespace, folder: Path) -> Path:
    """Train the model, then its drafter; return the checkpoint."""
    model, stages, token_map = configure(
        options.preset, options.data, list(settings(options)), stages=STAGES
    )
    run = Run(
        model=model,
        stages=stages,
        token_map=token_map,
        data=options.data,
        heldout=None,
        out=folder,
        device=torch.device(options.device),
    )
    return Unsaved(run, resume=False).fit(tell_step)


def tell_step(record_: StepRecord) -> None:
    """Show every tenth step."""
    if record_.step % 10 == 0:
        tell(f"{record_.stage} {record_.step}: loss {record_.loss:.3f}")


def tell(text: str) -> None:
    """Show what happens, and when."""
    sys.stderr.write(f"{time.perf_counter() - START:6.1f} s  {text}\n")


def keep(name: str, lines: Lines, options: argparse.Namespace) -> list[dict[str, object]]:
    """Write each line as soon as it is found."""
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    about = machine() | commit_of(options.commit) | {"device": device}
    kept: list[dict[str, object]] = []
    for line in lines:
        kept.append(line)
        found = record(f"{name}_{options.label}", kept, about=about, folder=options.out)
        shown = ("load", "engine", "policy", "forced_length", "tokens_per_second", "ratio")
        tell(f"{name} " + ", ".join(f"{k} {line[k]}" for k in shown if k in line))
    return found


def main() -> None:
    """Train, measure, write and draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dspark_small")
    parser.add_argument("data", type=Path)
    parser.add_argument("text", type=Path, help="held-out text")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=425_984, help="of the model")
    parser.add_argument("--draft-tokens", type=int, default=131_072, help="of the drafter")
    parser.add_argument("--set", action="append", default=[], help="a setting, as openv41 train's")
    parser.add_argument("--numerics", default="bf16qat", choices=sorted(NUMERICS))
    parser.add_argument("--loads", type=int, nargs="+", default=dspark_speed.LOADS)
    parser.add_argument("--answer-tokens", type=int, default=144)
    parser.add_argument("--per-load", type=int, default=2, help="requests for each place")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=48, help="of the calibration")
    parser.add_argument("--greedy-loads", type=int, nargs="+", default=[1], help="at temperature 0")
    parser.add_argument("--label", default="small_h200", help="in the records' names")
    parser.add_argument("--commit", default="", help="where there is no git")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        checkpoint = train(options, Path(scratch) / "run")
        tell("trained")
        measure(checkpoint, options)


def measure(checkpoint: Path, options: argparse.Namespace) -> None:
    """Everything that needs the trained model."""
    out, label = options.out, options.label
    prepared = dspark_speed.prepare(checkpoint, options.text, options)
    replayed = keep("dspark_replay", prepared, options)
    dspark_replay.draw(replayed, out / f"dspark_replay_{label}.png")
    keep("dspark_profile", dspark_speed.profile_lines(checkpoint, label), options)
    options.checkpoint, options.tokens = checkpoint, FORCED_TOKENS
    keep("speculation", speculation.measure(options), options)
    every = options.loads
    for temperature, name in ((1.0, "dspark_speed"), (0.0, "dspark_speed_greedy")):
        options.temperature, options.tokens = temperature, options.answer_tokens
        options.loads = every if temperature else options.greedy_loads
        found = keep(name, dspark_speed.measure(checkpoint, options.text, options), options)
        dspark_speed.draw(found, out / f"{name}_{label}.png")


if __name__ == "__main__":
    main()
