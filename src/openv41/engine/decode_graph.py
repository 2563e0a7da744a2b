"""Decode steps as CUDA graphs: one launch replays every kernel of a step. Report §2.2.

A step has a row for the newest token of each request, and for each draft behind it. Rows are
described by tensors that stay where they are: token ids, positions, places in the rings; page
tables are kept by place. Sizes are rounded up: rows by repeating the last one, which computes and
writes the same once more, and pages to a power of two, which nobody reads. The first step of each
size runs call by call, the second is captured, every later one is a replay. What prompts beside it
need is launched while it runs.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from openv41.engine.captured import Captured, Staged, rounded, sizes_up_to
from openv41.engine.job import Job
from openv41.engine.paged_store import PagedStore
from openv41.engine.speculation import Drafter
from openv41.layers.batch import Batch
from openv41.layers.context import Work, frequencies
from openv41.layers.decode_context import DecodeState, StoredRows
from openv41.layers.engram import PrefetchingTable
from openv41.layers.objectives import Losses
from openv41.layers.store import Slot
from openv41.model.cache_formats import RowFormat, row_format
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder, Output
from openv41.model.dspark import DSparkDrafter
from openv41.ops._dispatch import is_reference

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)  # that kernels take
WIDTHS = (64, 128, 256, 512)  # of packed rows that kernels read
LEAST_POSITIONS = 1024  # that the smallest page table has room for
Size = tuple[int, int]  # rows and pages


@dataclass(frozen=True, eq=False)
class Computed:
    """What a step computes; a replay writes it to the same place."""

    hidden: Float[Tensor, "R D"]
    logits: Float[Tensor, "R V"]
    taps: Float[Tensor, "R width"] | None


class DecodeSteps:
    """Runs steps in which every request has its newest token of text, and drafts behind it."""

    def __init__(
        self,
        model: CausalEncoderDecoder,
        store: PagedStore,
        drafter: DSparkDrafter | None = None,
        *,
        captures: bool = True,
    ) -> None:
        """Steps store the context of ``drafter`` too; without ``captures`` they run by calls."""
        config, device = model.config, store.device
        self._model, self._store, self._drafter = model, store, drafter
        places = store.cache.max_requests
        self.most_rows = places * (1 + store.cache.draft_tokens)
        pages = min(-(-config.max_position // store.cache.page_size), store.cache.num_pages)
        self._inputs = Staged(3, self.most_rows, device)
        self._table = torch.zeros(places, pages, dtype=torch.int64, device=device)
        self._tables: list[Tensor | None] = [None] * places  # what the rows of the table hold
        self._rings = stored_rings(store)
        self._pages = {
            slot: _stored(
                rows,
                store.cache.page_size // config.compress_ratios[slot.layer],
                row_format(config, slot.kind, model.numerics, store.dtype),
                store.dtype,
            )
            for slot, rows in store.pages.items()
        }
        self._frequencies = stored_frequencies(model, device)
        self.captured: Captured[Size, Computed] = Captured(self._compute, device, captures=captures)

    @property
    def sizes(self) -> list[int]:
        """Rows that steps are padded to."""
        return sizes_up_to(self.most_rows)

    def prepare(self, page: int) -> None:
        """Capture steps of every number of rows, for short texts; writes to a page of nobody."""
        self._table.fill_(page)
        self._tables = [None] * len(self._tables)
        self._inputs.tell([(0, 0, 0)], self.most_rows)
        pages = min(self._table.shape[1], self._fewest_pages)
        self.captured.prepare((rows, pages) for rows in self.sizes)

    @property
    def _fewest_pages(self) -> int:
        return 1 << (LEAST_POSITIONS // self._store.cache.page_size - 1).bit_length()

    def parts(self, step: Sequence[tuple[Job, int]]) -> list[list[tuple[Job, int]]]:
        """Requests that can run here, then those whose prompts are computed beside them."""
        decoding = [(job, count) for job, count in step if not job.is_prefill]
        prompts = [(job, count) for job, count in step if job.is_prefill]
        if prompts and decoding and self.takes(decoding):
            return [decoding, prompts]
        return [list(step)]

    def takes(self, step: Sequence[tuple[Job, int]]) -> bool:
        """Whether a step can run here."""
        return sum(count for _, count in step) <= self.most_rows and not any(
            job.is_prefill
            or job.uses_choices
            or not self._store.has_whole_windows(job.number, job.done)
            for job, _ in step
        )

    def run(self, step: Sequence[tuple[Job, int]]) -> Output:
        """Compute the next positions of each job."""
        rows = sum(count for _, count in step)
        found = self.captured(self._describe(step, rows))
        batch = Batch(
            self._inputs.there[0, :rows],
            tuple(job.number for job, _ in step),
            tuple(job.done for job, _ in step),
            tuple(count for _, count in step),
        )
        has_drafts = self._drafter is not None
        for job, count in step:
            self._store.advance(job.number, job.done, job.done + count, drafts=has_drafts)
        taps = None if found.taps is None else found.taps[:rows].clone()  # they are kept for long
        return Output(
            hidden=found.hidden[:rows],
            batch=batch,
            taps=taps,
            tap_batch=None if taps is None else batch,
            expert_counts={},
            losses=Losses(),
            work=Work(),
            logits=found.logits[:rows],
        )

    def _describe(self, step: Sequence[tuple[Job, int]], rows: int) -> Size:
        """Tell the device of the jobs; what they need is left untold where it has not changed."""
        described: list[tuple[int, int, int]] = []
        for job, count in step:
            place, table = self._store.address(job.number)
            if self._tables[place] is not table:
                self._table[place, : len(table)] = table
                self._tables[place] = table
            tokens = enumerate(job.upcoming(count), job.done)
            described += [(token, position, place) for position, token in tokens]
        padded = rounded(rows, self.most_rows)
        self._inputs.tell(described, padded)
        size = self._store.cache.page_size
        pages = max((job.done + count - 1) // size + 1 for job, count in step)
        power = max(self._fewest_pages, 1 << (pages - 1).bit_length())
        return padded, min(self._table.shape[1], power)

    def _compute(self, size: Size) -> Computed:
        rows, pages = size
        token_ids, positions, places = self._inputs.there[:, :rows]
        state = DecodeState(
            token_ids=token_ids,
            positions=positions,
            places=places,
            table=self._table[:, :pages][places],
            page_size=self._store.cache.page_size,
            rings=self._rings,
            pages=self._pages,
            frequencies=self._frequencies,
        )
        output = self._model.decode(state)
        taps = output.taps
        if self._drafter is not None and taps is not None:
            self._drafter.write_rows(taps, state)
            taps = None
        return Computed(output.hidden, self._model.logits(output.hidden), taps)


def captured_steps(
    model: CausalEncoderDecoder, store: PagedStore, drafter: Drafter | None
) -> DecodeSteps | None:
    """Steps that are captured, on a CUDA device; None where they cannot be."""
    own = drafter if isinstance(drafter, DSparkDrafter) else None
    if store.device.type != "cuda":
        return None
    if (reason := why_not(model)) is not None:
        logger.warning("decode steps are not captured: %s", reason)
        return None
    return DecodeSteps(model, store, own)


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


def stored_rings(store: PagedStore) -> dict[Slot, StoredRows]:
    """All rings of a store, as steps address them."""
    return {
        slot: _stored(ring.rows, ring.size, ring.stored, store.dtype)
        for slot, ring in store.rings.items()
    }


def stored_frequencies(
    model: CausalEncoderDecoder, device: torch.device
) -> dict[bool, Float[Tensor, " pairs"]]:
    """Rotary frequencies of layers without and with main KV."""
    return {
        has_main: frequencies(model.config.attention, int(has_main)).to(device)
        for has_main in (False, True)
    }


def _stored(rows: Tensor, size: int, kept: RowFormat | None, dtype: torch.dtype) -> StoredRows:
    """Rows that decode steps address; token ids have no format."""
    if kept is None:
        return StoredRows(rows, size, None, torch.Tensor.clone)
    form = None if kept.packing is None else kept.packing.form
    return StoredRows(rows, size, form, partial(kept.unpack, dtype=dtype))
