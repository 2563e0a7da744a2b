"""What this card reaches today: copy, bf16 and FP8 matrix products, an empty graph."""

import statistics
import subprocess
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version

import torch

from benchmarks.h200.clock import Clock, Run

SIZE = 8192  # of the matrices
COPIED = 1 << 31  # bytes, read and written


@dataclass(frozen=True)
class Ceilings:
    """Rates of one run; floors are computed from them."""

    copy_bytes_per_s: float  # read + write
    bf16_flops_per_s: float
    fp8_flops_per_s: float
    empty_us: float  # a graph of one empty kernel

    def floor_us(self, num_bytes: int, flops: int = 0, rate: str = "bf16") -> float:
        """The larger of the times of the bytes and of the operations."""
        flops_per_s = self.bf16_flops_per_s if rate == "bf16" else self.fp8_flops_per_s
        return max(num_bytes / self.copy_bytes_per_s, flops / flops_per_s) * 1e6

    def line(self) -> dict[str, object]:
        """As the first line of a result file."""
        return {"op": "ceilings", **asdict(self)}


def measure(clock: Clock) -> Ceilings:
    """Measure all, about two seconds. Matrix products are bursts: p10 of samples, not sustained."""
    source = torch.randint(0, 127, (COPIED,), dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    # Eager: a graph makes it a memcpy node, which is slower than the copy kernel.
    copy_us = statistics.median(_samples(clock, partial(target.copy_, source)))
    del source, target
    left, right = (torch.randn(SIZE, SIZE, device=clock.device) for _ in range(2))
    half = left.bfloat16(), right.bfloat16()
    eighth = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=clock.device)
    out = torch.empty(SIZE, SIZE, dtype=torch.bfloat16, device=clock.device)

    def fp8() -> None:
        torch._scaled_mm(*eighth, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    bf16_us = _tenth(_samples(clock, lambda: torch.mm(*half, out=out)))
    fp8_us = _tenth(_samples(clock, fp8))
    flops = 2 * SIZE**3
    return Ceilings(
        2 * COPIED / copy_us * 1e6, flops / bf16_us * 1e6, flops / fp8_us * 1e6, clock.empty_us
    )


def about() -> dict[str, object]:
    """Device and versions."""
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver.stdout.strip(),
        "cuda": torch.version.cuda,
        "triton": version("triton"),
    }


def _samples(clock: Clock, run: Run) -> list[float]:
    clock.sample([run], 5)
    return clock.sample([run], 40)


def _tenth(samples: list[float]) -> float:
    return sorted(samples)[len(samples) // 10]
