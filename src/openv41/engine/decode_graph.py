"""Decode steps as CUDA graphs: one launch replays every kernel of a step. Report §2.2.

A step is described by tensors that stay where they are: token ids, positions, places in the rings
and page tables. Its sizes are rounded up: requests to a power of two, by repeating the first one,
which computes and writes the same once more, and pages to a power of two, which nobody reads. The
first step of each size runs call by call, the second is captured, every later one is a replay.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from openv41.engine.job import Job
from openv41.engine.paged_store import PagedStore
from openv41.layers.batch import Batch
from openv41.layers.context import Work, frequencies
from openv41.layers.decode_context import DecodeState, StoredRows
from openv41.layers.engram import PrefetchingTable
from openv41.layers.objectives import Losses
from openv41.model.cache_formats import RowFormat, row_format
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder, Output
from openv41.ops._dispatch import is_reference

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)  # that kernels take
WIDTHS = (64, 128, 256, 512)  # of packed rows that kernels read
LEAST_POSITIONS = 1024  # that the smallest page table has room for
Size = tuple[int, int]  # requests and pages


@dataclass(frozen=True, eq=False)
class Computed:
    """What a step computes; a replay writes it to the same place."""

    hidden: Float[Tensor, "R D"]
    logits: Float[Tensor, "R V"]
    taps: Float[Tensor, "R width"] | None


class DecodeSteps:
    """Runs steps in which every request has one new token of text."""

    def __init__(
        self, model: CausalEncoderDecoder, store: PagedStore, *, captures: bool = True
    ) -> None:
        """Without ``captures`` every step runs call by call."""
        config, device = model.config, store.device
        self.captures = captures
        self.replays = 0
        self._model, self._store = model, store
        most = store.cache.max_requests
        pages = min(-(-config.max_position // store.cache.page_size), store.cache.num_pages)
        is_cuda = device.type == "cuda"
        self._given = torch.zeros(3, most, dtype=torch.int64, pin_memory=is_cuda)
        self._inputs = torch.zeros(3, most, dtype=torch.int64, device=device)
        self._table = torch.zeros(most, pages, dtype=torch.int64, device=device)
        self._tables: list[Tensor | None] = [None] * most  # what the rows of the table hold
        self._rings = {
            slot: _stored(ring.rows, ring.size, ring.stored, store.dtype)
            for slot, ring in store.rings.items()
        }
        self._pages = {
            slot: _stored(
                rows,
                store.cache.page_size // config.compress_ratios[slot.layer],
                row_format(config, slot.kind, model.numerics, store.dtype),
                store.dtype,
            )
            for slot, rows in store.pages.items()
        }
        self._frequencies = {
            has_main: frequencies(config.attention, int(has_main)).to(device)
            for has_main in (False, True)
        }
        self._met: set[Size] = set()
        self._graphs: dict[Size, tuple[torch.cuda.CUDAGraph, Computed]] = {}
        self._pool = torch.cuda.graph_pool_handle() if is_cuda else None

    @property
    def graphs(self) -> int:
        """Sizes that are captured."""
        return len(self._graphs)

    def takes(self, step: Sequence[tuple[Job, int]]) -> bool:
        """Whether a step can run here."""
        return all(
            count == 1
            and not (job.is_prefill or job.uses_choices)
            and self._store.has_whole_windows(job.number, job.done)
            for job, count in step
        )

    def run(self, jobs: Sequence[Job]) -> Output:
        """Compute the next position of each job."""
        size = self._describe(jobs)
        found, num = self._computed(size), len(jobs)
        batch = Batch(
            self._inputs[0, :num],
            tuple(job.number for job in jobs),
            tuple(job.done for job in jobs),
            (1,) * num,
        )
        for job in jobs:
            self._store.advance(job.number, job.done)
        taps = None if found.taps is None else found.taps[:num].clone()  # they are kept for long
        return Output(
            hidden=found.hidden[:num],
            batch=batch,
            taps=taps,
            tap_batch=None if taps is None else batch,
            expert_counts={},
            losses=Losses(),
            work=Work(),
            logits=found.logits[:num],
        )

    def _describe(self, jobs: Sequence[Job]) -> Size:
        """Tell the device of the jobs; what they need is left untold where it has not changed."""
        rows = _rounded(len(jobs), self._given.shape[1])
        filled = [*jobs, *[jobs[0]] * (rows - len(jobs))]
        found = [self._store.address(job.number) for job in filled]
        self._given[:, :rows] = torch.tensor(
            [[j.tokens[j.done] for j in filled], [j.done for j in filled], [p for p, _ in found]]
        )
        self._inputs.copy_(self._given, non_blocking=True)
        for row, (_, table) in enumerate(found):
            if self._tables[row] is not table:
                self._table[row, : len(table)] = table
                self._tables[row] = table
        size = self._store.cache.page_size
        pages = max(LEAST_POSITIONS // size, *(job.done // size + 1 for job in jobs))
        return rows, _rounded(pages, self._table.shape[1])

    def _computed(self, size: Size) -> Computed:
        """Replay a step of this size, or run it and capture the next one."""
        if size not in self._graphs:
            if not (self.captures and size in self._met):
                self._met.add(size)
                return self._compute(size)
            try:
                self._graphs[size] = self._capture(size)
            except Exception:
                logger.exception("decode steps are not captured: the engine goes on without")
                self.captures = False
                return self._compute(size)
        graph, computed = self._graphs[size]
        graph.replay()
        self.replays += 1
        return computed

    def _capture(self, size: Size) -> tuple[torch.cuda.CUDAGraph, Computed]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            computed = self._compute(size)
        logger.info("captured decode steps of %d requests and %d pages", *size)
        return graph, computed

    def _compute(self, size: Size) -> Computed:
        rows, pages = size
        token_ids, positions, places = self._inputs[:, :rows]
        output = self._model.decode(
            DecodeState(
                token_ids=token_ids,
                positions=positions,
                places=places,
                table=self._table[:rows, :pages],
                page_size=self._store.cache.page_size,
                rings=self._rings,
                pages=self._pages,
                frequencies=self._frequencies,
            )
        )
        return Computed(output.hidden, self._model.logits(output.hidden), output.taps)


def captured_steps(model: CausalEncoderDecoder, store: PagedStore) -> DecodeSteps | None:
    """Steps that are captured, on a CUDA device; None where they cannot be."""
    if store.device.type != "cuda":
        return None
    if (reason := why_not(model)) is not None:
        logger.warning("decode steps are not captured: %s", reason)
        return None
    return DecodeSteps(model, store)


def why_not(model: CausalEncoderDecoder) -> str | None:
    """Why decode steps of a model cannot be captured; None where they can.

    A capture that fails leaves the generator of random numbers unusable, so that none may be tried
    where the reference of an op would run.
    """
    numerics, width = model.numerics, model.config.attention.head_dim
    dtype, is_packed = model.norm.weight.dtype, numerics.main_kv != "off"
    is_narrow = numerics.compute_dtype == "bfloat16" and dtype != torch.bfloat16
    tables = [engram.table for engram in model.engrams()]
    reasons = {
        "deterministic sums take tiles apart on the host": numerics.deterministic,
        "window and main KV are not stored alike": is_packed != (numerics.window_kv != "off"),
        f"no kernels run on {dtype}": dtype not in DTYPES or is_reference(),
        "queries are narrower than what is stored": is_narrow and not is_packed,
        f"no kernel attends to rows of {width} numbers as they are stored": width > max(WIDTHS)
        or (is_packed and width not in WIDTHS),
        "an Engram table is read by the host": any(
            isinstance(table, PrefetchingTable) and table.reads_on_host for table in tables
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _stored(rows: Tensor, size: int, kept: RowFormat | None, dtype: torch.dtype) -> StoredRows:
    """Rows that decode steps address; token ids have no format."""
    if kept is None:
        return StoredRows(rows, size, None, torch.Tensor.clone)
    form = None if kept.packing is None else kept.packing.form
    return StoredRows(rows, size, form, partial(kept.unpack, dtype=dtype))


def _rounded(count: int, most: int) -> int:
    return min(most, 1 << (count - 1).bit_length())
