"""Speed and memory beside the peers on `bench30m`, float32, all on the same cores.

Every implementation runs in a process of its own, stopped while it has nothing to do; one command
is under way at a time, in the order ABCCBA. What it computes is compared first.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from openv41.presets import preset
from tests.peers.load import MODULES
from tests.peers.random_checkpoint import write_random

CORES = 2
CONTEXT = 512
CHECKED = 136  # tokens of the decode check
CASES = (
    ("forward", {"tokens": 512}),
    ("decode", {"context": CONTEXT}),
    ("prefill", {"tokens": 512}),
    ("decode_batch", {"context": CONTEXT, "batch": 1}),
    ("decode_batch", {"context": CONTEXT, "batch": 8}),
    ("train", {"batch": 4, "tokens": 512}),
)
NO_GOAL = ("ftllm",)  # rounds on its way; its ratio is only reported
GOALS = {
    ("forward", "mlx-vlm"): 1.0,
    ("decode", "mlx-vlm"): 1.0,
    ("prefill", "mlx-vlm"): 1.0,
    ("decode_batch", "mlx-vlm"): 1.0,
    ("forward", "nemo-automodel"): 1.0,
    ("train", "nemo-automodel"): 1.5,
}
ERROR_BOUND = 2e-4  # median over rows; single rows flip a choice and differ more
MIN_ROUNDS, MAX_ROUNDS = 2, 20
ROUND_SECONDS = 30


class Worker:
    """The process of one implementation."""

    def __init__(self, name, folder):
        self.name = name
        threads = {
            n: str(CORES) for n in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        }
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.peers.worker", name, str(folder), str(CORES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=os.environ | threads,
        )
        try:
            self.hello = self.read()
        except BaseException:
            self.close()
            raise

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise RuntimeError(self._last_words())
        self.process.send_signal(signal.SIGSTOP)  # threads that wait busily take the others' time
        return json.loads(line)

    def _last_words(self):
        self.log.seek(0)
        lines = [s for s in self.log.read().splitlines() if s.strip() and "any key" not in s]
        return lines[-1].strip() if lines else "no message"

    def ask(self, **command):
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.close()
        self.process.wait()
        self.log.close()


def speed_lines(say):
    """Yield a line per case and implementation, and one per goal."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    config = preset("bench30m")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (4 * CONTEXT,), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as folder:
        write_random(folder, config)
        for case, sizes in CASES:
            yield from _measure(case, sizes, ids, Path(folder), say)


def _measure(case, sizes, ids, folder, say):
    workers, lines = [], []
    what = {"case": case} | sizes
    for name in MODULES:
        try:
            worker = Worker(name, folder)
        except RuntimeError as error:
            if name == "openv41":
                raise
            yield what | {"implementation": name, "status": "not run", "reason": str(error)}
            continue
        if case not in worker.hello["cases"]:
            reason = _why_not(name, case)
            yield what | {"implementation": name, "status": "not run", "reason": reason}
            worker.close()
            continue
        save = str(folder / f"{name} at the start")
        worker.ask(do="start", case=case, ids=ids[:CONTEXT], batch=sizes.get("batch"), save=save)
        workers.append(worker)
    command = {"do": "run", "case": case, "ids": _inputs(case, sizes, ids)}
    errors = _first_results(workers, command, ids, folder)
    samples = _rotate(workers, command, say)
    for w in workers:
        times = sorted(samples[w.name])
        line = what | {"implementation": w.name, "status": "run", "version": w.hello["version"]}
        line |= {"threads": w.hello["threads"], "samples": len(times)}
        line |= {"median_ms": statistics.median(times), "min_ms": times[0], "max_ms": times[-1]}
        line |= {"loaded_mb": w.hello["loaded_mb"], **w.ask(do="memory"), **errors[w.name]}
        lines.append(line)
        w.close()
    yield from lines
    yield from _goals(what, lines)


def _why_not(name, case):
    if case == "train":
        return "is not trained here"
    return "serves requests only" if name == "ftllm" else "has no cache"


def _inputs(case, sizes, ids):
    if case == "decode":
        return ids[CONTEXT]
    if case in ("forward", "prefill"):
        return ids[: sizes["tokens"]]
    if case == "decode_batch":
        return ids[CONTEXT : CONTEXT + sizes["batch"]]
    n = sizes["tokens"]
    return [ids[i * n : (i + 1) * n] for i in range(sizes["batch"])]


def _first_results(workers, command, ids, folder):
    """Compare the first results with those of openv41; this is also the warm-up.

    Decoding is compared behind a short prompt: one row at a long context says little, because a
    near tie in an earlier row moves it.
    """
    results = {}
    for w in workers:
        if command["case"] == "decode":
            w.ask(do="check", ids=ids[:CHECKED], save=str(folder / w.name))
            w.ask(do="start", case="decode", ids=ids[:CONTEXT])
            w.ask(**command)
        elif command["case"] == "decode_batch":
            (folder / f"{w.name} at the start").rename(folder / w.name)
        else:
            w.ask(**command, save=str(folder / w.name))
        results[w.name] = torch.as_tensor(torch.load(folder / w.name))
    own = results["openv41"]
    return {n: _error(r, own) for n, r in results.items()}


def _error(result, own):
    rows = (result - own).abs().reshape(-1, result.shape[-1] if result.ndim else 1).amax(1)
    median = rows.median().item()
    worst, is_right = rows.max().item(), median <= ERROR_BOUND
    line = {"median_row_error": median, "max_error": worst, "is_right": is_right}
    if result.ndim:
        same = result.argmax(-1) == own.argmax(-1)
        line |= {"largest_logit": own.abs().max().item()}
        line |= {"rows": same.numel(), "rows_of_equal_greedy_token": int(same.sum())}
    return line


def _rotate(workers, command, say):
    """Sample in the order ABCCBA until the time of a case is used."""
    samples = {w.name: [] for w in workers}
    rounds = MIN_ROUNDS
    done = 0
    while done < rounds:
        for w in (*workers, *reversed(workers)):
            samples[w.name].append(w.ask(**command)["ms"])
        done += 1
        round_seconds = 2 * sum(statistics.median(s) for s in samples.values()) / 1e3
        rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, int(ROUND_SECONDS / round_seconds)))
        say(f"    round {done} of {rounds}: {_show(samples)}")
    return samples


def _show(samples):
    return ", ".join(f"{n} {statistics.median(s):.1f} ms" for n, s in samples.items())


def _goals(what, lines):
    own = next(line for line in lines if line["implementation"] == "openv41")
    for line in lines:
        goal = GOALS.get((what["case"], line["implementation"]))
        ratio = line["median_ms"] / own["median_ms"]
        if line["implementation"] in NO_GOAL:
            yield what | {"goal": None, "peer": line["implementation"], "ratio": ratio}
        if goal is not None:
            met = ratio >= goal and line["is_right"]
            yield what | {"goal": goal, "peer": line["implementation"], "ratio": ratio, "met": met}
