"""Training steps of ``small`` on GPUs: tokens per second, utilisation, memory; NeMo beside them.

``python -m benchmarks.gpu_training`` measures, on the GPUs it finds and in one run, our step on one
GPU (with the report's optimizers, and with AdamW) and on two (experts sharded, and parallel), and
NeMo AutoModel's eager path where it can be imported. Every part is a process of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from benchmarks.record import REPOSITORY, record
from openv41.config import ModelConfig
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.init import init_weights
from openv41.ops import kernels
from openv41.presets import preset
from openv41.train.config import NUMERICS_OF, OptimizerConfig, TrainConfig
from openv41.train.optimizer import Optimizers
from openv41.train.packed_batch import PackedBatch
from openv41.train.placement import distribute
from openv41.train.processes import Processes, join
from openv41.train.recipes import NO_TOKEN
from openv41.train.step import train_step
from openv41.train.utilisation import FlopCounter

PARTS = {
    "ours": 1,
    "ours, AdamW": 1,
    "ours, AdamW, reference ops": 1,
    "nemo-automodel": 1,
    "ours, sharded": 2,
    "ours, parallel": 2,
}
ROUNDS = (  # parts on GPUs of their own, side by side
    {"ours, AdamW": "0", "nemo-automodel": "1"},
    {"ours": "0", "ours, AdamW, reference ops": "1"},
    {"ours, sharded": "0,1"},
    {"ours, parallel": "0,1"},
)
Line = dict[str, Any]


def text_model(name: str) -> ModelConfig:
    """A preset without images and drafter."""
    return replace(preset(name), vision=None, dspark=None, image_token_id=NO_TOKEN)


def random_batch(options: argparse.Namespace, documents: int, seed: int) -> PackedBatch:
    """Documents of random tokens, of the same length."""
    generator = torch.Generator().manual_seed(seed)
    size = (documents * options.context,)
    ids = torch.randint(preset(options.preset).vocab_size, size, generator=generator)
    return PackedBatch(ids, (options.context,) * documents)


def timed(options: argparse.Namespace, step: Callable[[int], float]) -> Line:
    """Median seconds of a step after the warm-up, the losses of all, and the memory they took."""
    seconds, cpu_seconds, losses = [], [], []
    for number in range(options.warm_up + options.steps):
        start, busy = time.perf_counter(), time.process_time()
        losses.append(step(number))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - busy)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    found = {"seconds_per_step": statistics.median(seconds[options.warm_up :]), "losses": losses}
    return found | {"cpu_seconds": cpu_seconds[options.warm_up :], "peak_gb": peak / 1e9}


class Ours(NamedTuple):
    """Our step, of ``options.documents`` per process, and what it computes."""

    step: Callable[[int], float]
    parameters: int
    tokens: int
    flops: int  # of the model in a step
    counter: FlopCounter


def make_ours(options: argparse.Namespace, processes: Processes) -> Ours:
    """Make the model and its optimizers."""
    config, is_cuda = text_model(options.preset), processes.device.type == "cuda"
    numerics = NUMERICS_OF["bf16" if is_cuda else "f32"]
    model = CausalEncoderDecoder(config, numerics, device=processes.device, dtype=torch.float32)
    if config.engram is not None:
        model.set_token_map(torch.arange(config.vocab_size) % config.engram.compressed_vocab_size)
    init_weights(model, 1)
    counter = FlopCounter(model, processes.device)
    parameters = sum(p.numel() for p in model.parameters())
    documents = options.documents * processes.size
    tokens = documents * options.context
    train = train_config(options, tokens)
    experts = "parallel" if "parallel" in options.part else "sharded"
    optimizer = Optimizers(distribute(model, processes, experts), train.optimizer)

    def step(number: int) -> float:
        packed = random_batch(options, documents, number)
        return train_step(model, optimizer, packed, train, number).loss

    packed, targets = random_batch(options, documents, 0), tokens - documents
    flops = counter.step(packed, num_targets=targets, encoder_learns=False)
    return Ours(step, parameters, tokens, flops, counter)


def measure_ours(options: argparse.Namespace, processes: Processes) -> Line:
    """Time our step."""
    ours = make_ours(options, processes)
    found = timed(options, ours.step)
    speed = ours.flops / found["seconds_per_step"]
    return found | {
        "gpus": processes.size,
        "parameters": ours.parameters,
        "tokens_per_second": ours.tokens / found["seconds_per_step"],
        "model_flops_per_second": speed,
        "mfu": ours.counter.share(speed, processes.size),
        "peak_gb": max(processes.gather(found["peak_gb"])),
    }


def train_config(options: argparse.Namespace, tokens: int) -> TrainConfig:
    """The step that is measured: one micro-batch per process."""
    optimizer = OptimizerConfig(ns_dtype="bfloat16")
    if "AdamW" in options.part:
        optimizer = replace(optimizer, matrix_update="adamw", token_update="adamw")
    return TrainConfig(
        tokens=10**9,
        sequence_length=options.context,
        batch_tokens=tokens,
        warmup_tokens=0,
        activation_checkpointing=not options.keep_activations,
        update_rms_steps=0,
        optimizer=optimizer,
    )


def measure_nemo(options: argparse.Namespace) -> Line:
    """NeMo AutoModel's step on as many tokens."""
    from tests.peers.nemo_training import NemoTraining  # noqa: PLC0415 -- only where it is installed

    peer = NemoTraining(text_model(options.preset), options.device)
    shape = options.documents, options.context
    found = timed(options, lambda n: peer.step(random_batch(options, shape[0], n).ids.view(shape)))
    return found | {
        "version": peer.version,
        "gpus": 1,
        "parameters": sum(p.numel() for p in peer.model.parameters()),
        "tokens_per_second": shape[0] * shape[1] / found["seconds_per_step"],
    }


def run_part(options: argparse.Namespace) -> None:
    """Measure one part and print its line."""
    if options.part == "nemo-automodel":
        sys.stdout.write(json.dumps(measure_nemo(options)) + "\n")
        return
    with (
        join(torch.device(options.device)) as processes,
        kernels("reference" if "reference ops" in options.part else "auto"),
    ):
        line = measure_ours(options, processes)
        if processes.is_first:
            sys.stdout.write(json.dumps(line) + "\n")


def python_of(part: str) -> str:
    """The interpreter that has what a part needs."""
    peers = REPOSITORY / ".peers" / "bin" / "python"
    return str(peers) if part == "nemo-automodel" and peers.exists() else sys.executable


def start_part(options: argparse.Namespace, part: str, gpus: str) -> subprocess.Popen[str]:
    """Start a part in a process of its own, or in two."""
    number = PARTS[part]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    words = [
        f"--{key.replace('_', '-')}" if value is True else f"--{key.replace('_', '-')}={value}"
        for key, value in vars(options).items()
        if key not in {"part", "rounds"} and value is not False
    ]
    module = ["-m", "benchmarks.gpu_training", "--part", part, *words]
    return subprocess.Popen(
        ["timeout", str(options.limit), python_of(part), *(launch if number > 1 else []), *module],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus},
    )


def lines(options: argparse.Namespace) -> Iterator[Line]:
    """Every part's line; a part that failed says why."""
    about: Line = {"preset": options.preset, "context": options.context}
    about["tokens_per_gpu_and_step"] = options.documents * options.context
    about |= {"warm_up_steps": options.warm_up, "measured_steps": options.steps}
    about["recomputes_activations"] = not options.keep_activations
    if torch.cuda.is_available():
        about |= {"device": torch.cuda.get_device_name(0), "found": torch.cuda.device_count()}
    alone = tuple({part: "0"} for part, gpus in PARTS.items() if gpus == 1)
    for parts in ROUNDS if torch.cuda.device_count() > 1 else alone:
        started = {part: start_part(options, part, gpus) for part, gpus in parts.items()}
        for part, process in started.items():
            out, error = process.communicate()
            found = [line for line in out.splitlines() if line.startswith("{")]
            failed = {"status": "not run", "reason": error.strip()[-1500:]}
            line = about | {"part": part} | (json.loads(found[-1]) if found else failed)
            sys.stderr.write(json.dumps(line)[-1200:] + "\n")
            yield line


def parser(program: str) -> argparse.ArgumentParser:
    """The words of the command line."""
    words = argparse.ArgumentParser(prog=program)
    words.add_argument("--part", choices=PARTS)
    words.add_argument("--preset", default="small")
    words.add_argument("--documents", type=int, default=2, help="per GPU and step")
    words.add_argument("--context", type=int, default=4096)
    words.add_argument("--device", default="cuda")
    help_ = "do not recompute them in the backward pass; NeMo never does"
    words.add_argument("--keep-activations", action="store_true", help=help_)
    words.add_argument("--warm-up", type=int, default=2, help="steps before the measured ones")
    words.add_argument("--steps", type=int, default=5)
    words.add_argument("--limit", type=int, default=75, help="seconds of one part")
    return words


def main() -> None:
    """Measure all parts, or one."""
    options = parser("python -m benchmarks.gpu_training").parse_args()
    if options.part:
        run_part(options)
    else:
        record("gpu_training", lines(options))


if __name__ == "__main__":
    main()
