"""One implementation in a process of its own: reads commands as JSON lines, answers likewise.

Run by tests.peers.speed. stdin and stdout belong to the protocol; whatever a library prints goes
to stderr.
"""

import json
import os
import sys
import time

import torch

from tests.peers.load import implementation


def main(name, folder, threads):
    """Load, then serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    commands = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # ftllm waits for a key after an error
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    kind, version, cases = implementation(name)
    model = kind(folder)
    answer = {"version": version, "cases": cases, "loaded_mb": _memory("VmRSS"), "threads": threads}
    while True:
        answers.write(json.dumps(answer) + "\n")
        line = commands.readline()
        if not line:
            os._exit(0)  # ftllm's threads go on, and crash while the interpreter ends
        answer = _serve(model, json.loads(line))


def _serve(model, command):
    if command["do"] == "start":
        return _start(model, command)
    if command["do"] == "memory":
        return {"peak_mb": _memory("VmHWM")}
    if command["do"] == "check":
        return _check_decode(model, command["ids"], command["save"])
    ids, case = command["ids"], command["case"]
    ms = None
    begin = time.perf_counter()
    if case == "forward":
        result = model.logits(ids)
    elif case == "decode":
        result = model.step(ids)
    elif case == "prefill":
        result = model.serve_prompt(ids)
    elif case == "decode_batch":
        ms = model.batch_step(ids)  # the peer's own measure, or None
    else:
        result = model.train_step(ids)
    if ms is None:
        ms = (time.perf_counter() - begin) * 1e3
    if command.get("save"):
        torch.save(result, command["save"])
    return {"ms": ms}


def _start(model, command):
    """Bring the model to where the case begins, and forget earlier peaks of memory."""
    with open("/proc/self/clear_refs", "w") as file:  # noqa: PTH123 -- a kernel switch, no file
        file.write("5")
    if command["case"] == "decode":
        model.prefill(command["ids"])
    if command["case"] == "decode_batch":
        torch.save(model.start_batch(command["ids"], command["batch"]), command["save"])
    if command["case"] == "train":
        return {"trained": model.start_training()}
    return {}


def _check_decode(model, ids, save):
    """Keep the logits of the last eight of `ids`, decoded one at a time."""
    model.prefill(ids[:-8])
    torch.save(torch.stack([model.step(token) for token in ids[-8:]]), save)
    return {}


def _memory(field):
    """Return a field of /proc/self/status in MB."""
    with open("/proc/self/status") as file:  # noqa: PTH123 -- a kernel table, no file
        return next(int(s.split()[1]) / 1024 for s in file if s.startswith(field))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
