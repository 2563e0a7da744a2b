"""Microseconds of work on the GPU: CUDA-graph replays with a cold L2.

A sample is [read 256 MB] [event] [one replay] [event]. The read leaves nothing of the inputs in the
60 MB L2, and keeps the GPU busy while the replay is enqueued. Replays take turns over input sets.
A graph of one empty kernel takes about 4 us of each sample; it is measured beside every row.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

WARM_UP = 20
SAMPLES = 120
Run = Callable[[], Any]


class Clock:
    """The GPU's events, the buffer that evicts L2, and the time of an empty graph."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        self.flush = torch.randint(0, 127, (1 << 28,), dtype=torch.int8, device=self.device)
        self.flush = self.flush.view(torch.int32)
        self.spill = torch.empty((), dtype=torch.int32, device=self.device)
        empty, _ = self.captured(lambda: torch.cuda._sleep(0))
        self.sample([empty], WARM_UP)
        self.empty_us = statistics.median(self.sample([empty], SAMPLES))

    def wait(self) -> None:
        """Until all work is done; raises what a kernel did wrong."""
        torch.cuda.synchronize()

    def is_alive(self) -> bool:
        """Whether the GPU still runs work of this process; after a fault it does not."""
        try:
            torch.cuda.synchronize()
            torch.zeros(1, device=self.device).item()
        except RuntimeError:
            return False
        return True

    def captured(self, run: Run) -> tuple[Run, Any]:
        """Warm up, capture and return the replay with its outputs; raises what the capture does."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = run()
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay, outputs

    def sample(self, runs: Sequence[Run], count: int) -> list[float]:
        """Time ``count`` runs, in turns; each starts with a cold L2."""
        pairs = [_events() for _ in range(count)]
        for number, (start, end) in enumerate(pairs):
            torch.amax(self.flush, dim=0, out=self.spill)
            start.record()
            runs[number % len(runs)]()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in pairs]

    def count(self, runs: Sequence[Run], seconds: float) -> int:
        """Samples of one of four turns that fit into ``seconds``, after the warm-up."""
        guess = statistics.median(self.sample(runs, 3))
        self.sample(runs, max(3, min(WARM_UP, int(seconds / 2 / (guess * 1e-6)))))
        return max(3, min(SAMPLES // 4, int(seconds / 4 / ((guess + 90) * 1e-6))))


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
