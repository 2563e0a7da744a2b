"""Where a training step on a GPU spends its time: kernels by time and number, calls by source.

``python -m benchmarks.step_profile`` runs the step of ``benchmarks.gpu_training`` (part "ours,
AdamW", or another ``--part``), then one under torch's profiler and one under a counter of torch's
calls, and prints tables. Views and allocations are no calls: they launch nothing.
"""

import json
import sys
import time
from collections import Counter
from types import FrameType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_training import make_ours, parser
from openv41.train.processes import Processes

TOP = 25
SILENT = {
    "_conj",
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "as_strided",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "expand",
    "is_same_size",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
    "permute",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
    "view_as_complex",
    "view_as_real",
}
WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_unique2")


class Calls(TorchDispatchMode):
    """Counts torch's calls, and those that wait for the device, by line of this project."""

    def __init__(self) -> None:
        super().__init__()
        self.by_line: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 -- of torch
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        name = func.overloadpacket.__name__
        if name not in SILENT:
            place = _place(sys._getframe(1))
            node = torch._C._current_autograd_node()
            if node is not None and "layers/" not in place:
                place = f"{node.name()} {place}"
            self.by_line[place] += 1
            if name in WAITING:
                self.waits[place] += 1
        return func(*args, **(kwargs or {}))


def _place(frame: FrameType | None) -> str:
    """The innermost line of this project on the stack."""
    while frame is not None:
        _, is_ours, name = frame.f_code.co_filename.rpartition("/openv41/")
        if is_ours and "ops/precision" not in name and "ops/_dispatch" not in name:
            return f"{name}:{frame.f_code.co_name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def table(title: str, rows: list[tuple[Any, ...]]) -> None:
    """Print some rows."""
    sys.stdout.write(f"== {title}\n")
    for row in rows[:TOP]:
        sys.stdout.write("  ".join(str(value) for value in row) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Warm up, profile a step, count the calls of another."""
    words = parser("python -m benchmarks.step_profile")
    words.set_defaults(part="ours, AdamW", warm_up=2, documents=1)
    options = words.parse_args()
    device = torch.device(options.device)
    step = make_ours(options, Processes(device=device)).step
    is_cuda = device.type == "cuda"

    def timed(number: int) -> float:
        start = time.perf_counter()
        step(number)
        if is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds = [timed(number) for number in range(options.warm_up + 1)]
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if is_cuda else [])
    with profile(activities=kinds) as found:
        profiled = timed(len(seconds))
    rows = found.key_averages()
    kernels = [row for row in rows if row.device_type == torch.autograd.DeviceType.CUDA]
    host = [row for row in rows if row.device_type == torch.autograd.DeviceType.CPU]
    on_device = sum(row.self_device_time_total for row in kernels)
    with Calls() as calls:
        step(len(seconds) + 1)
    by_time = sorted(kernels, key=lambda row: -row.self_device_time_total)
    table("kernels by time: ms, launches", [_kernel(row) for row in by_time])
    by_count = sorted(kernels, key=lambda row: -row.count)
    table("kernels by launches: ms, launches", [_kernel(row) for row in by_count])
    by_host = sorted(host, key=lambda row: -row.self_cpu_time_total)
    ms = [(f"{row.self_cpu_time_total / 1e3:.2f}", row.count, row.key[:90]) for row in by_host]
    table("calls by time on the host: ms, calls", ms)
    table("lines by calls", [(n, place) for place, n in calls.by_line.most_common(TOP)])
    table("lines that wait", [(n, place) for place, n in calls.waits.most_common(TOP)])
    line = {"seconds": seconds, "profiled_seconds": profiled, "device_ms": on_device / 1e3}
    line |= {"launches": sum(row.count for row in kernels), "calls": calls.by_line.total()}
    sys.stdout.write(json.dumps(line | {"waits": calls.waits.total()}) + "\n")


def _kernel(row: Any) -> tuple[str, int, str]:  # noqa: ANN401 -- of torch's profiler
    return f"{row.self_device_time_total / 1e3:.3f}", row.count, row.key[:110]


if __name__ == "__main__":
    main()
