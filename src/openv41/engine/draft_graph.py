"""A drafter's part of a step as CUDA graphs: features are stored, blocks drafted. Report §2.4.3.

As in ``decode_graph.py``: everything lies where it lay when it was captured, and sizes are rounded
up by repeating the last row.
"""

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from openv41.engine.captured import Captured, Staged, rounded, sizes_up_to
from openv41.engine.decode_graph import stored_frequencies, stored_rings, why_not
from openv41.engine.draft_choice import DraftChooser, Drawing, Drawn
from openv41.engine.job import Job
from openv41.engine.paged_store import PagedStore
from openv41.engine.speculation import Drafter
from openv41.layers.decode_context import DecodeState
from openv41.layers.store import Slot, Spans
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.dspark import DSparkDrafter

Size = tuple[int, bool]  # requests, and whether any of their drafts is sampled


class DraftSteps:
    """Tells a drafter what became part of requests, and lets it draft behind them."""

    def __init__(
        self,
        drafter: DSparkDrafter,
        model: CausalEncoderDecoder,
        store: PagedStore,
        num_tokens: int,
        *,
        captures: bool = True,
    ) -> None:
        """Tokens below ``num_tokens`` are drafted; without ``captures`` all runs call by call."""
        self._drafter, self._model, self._store = drafter, model, store
        self._num_tokens = num_tokens
        device, self._places = store.device, store.cache.max_requests
        self._most = self._places * (1 + store.cache.draft_tokens)
        layers = range(model.config.num_layers, model.config.num_layers + drafter.num_stages)
        self._slots = [Slot("window", layer) for layer in layers]
        self._rings = {slot: stored_rings(store)[slot] for slot in self._slots}
        self._frequencies = stored_frequencies(model, device)
        self._features = torch.zeros(
            self._most, drafter.tap_width, dtype=model.stream_dtype, device=device
        )
        self._known = Staged(3, self._most, device)  # token (none), position, place
        self._anchors = Staged(3, self._places, device)
        self._drawing = Staged(drafter.block_size + 2, self._places, device, torch.float64)
        self.written: Captured[int, None] = Captured(self._write, device, captures=captures)
        self.drafted: Captured[Size, Drawn] = Captured(self._draft, device, captures=captures)

    def prepare(self) -> None:
        """Capture drafts of every number of requests, for which all must be at rest."""
        for staged, most in ((self._known, self._most), (self._anchors, self._places)):
            staged.tell([(0, 0, 0)], most)
        self._drawing.tell([(*(0.5,) * self._drafter.block_size, 1.0, 1.0)], self._places)
        self.written.prepare(sizes_up_to(self._most))
        self.drafted.prepare(itertools.product(sizes_up_to(self._places), (False, True)))

    def blocks(self) -> list[Float[Tensor, "places X V"]]:
        """Chances that captured drafts leave in one place each."""
        return [found.shares for found in self.drafted.answers() if found.shares is not None]

    def lasting(self, shares: Tensor | None) -> Float[Tensor, "places X V"] | None:
        """These chances if they lie where those of later drafts will; else None."""
        return next((block for block in self.blocks() if block is shares), None)

    def knows(self, jobs: Sequence[Job]) -> bool:
        """Whether the rings hold all that the drafter reads of these requests."""
        window = self._model.config.attention.window_size
        asked = tuple(job.number for job in jobs), tuple(job.done for job in jobs)
        found = self._store.rows_before(self._slots[0], *asked)
        return all(n >= min(job.done, window) for n, job in zip(found, jobs, strict=True))

    def write(self, jobs: Sequence[Job]) -> bool:
        """Store all features of these jobs; False where there are more than a step brings."""
        count = sum(len(job.features) for job in jobs)
        reach = self._rings[self._slots[0]].size
        if count > self._most or any(len(job.features) > reach for job in jobs):
            return False
        described, spans = [], []
        for job in jobs:
            place, _ = self._store.address(job.number)
            first, stop = job.features.first, job.features.stop
            spans.append((job.number, first, stop))
            described += [(0, position, place) for position in range(first, stop)]
        rows = torch.cat([part for job in jobs for part in job.features.take()])
        assert rows.dtype == self._features.dtype, f"features are {rows.dtype}"
        size = rounded(count, self._most)
        self._features[:count] = rows
        self._features[count:size] = rows[-1]
        self._known.tell(described, size)
        self.written(size)
        for slot in self._slots:
            self._store.note(slot, Spans.of(spans))
        return True

    def draft(self, jobs: Sequence[Job], drawing: Sequence[Drawing]) -> Drawn:
        """Draft a block behind the newest token of each job."""
        size = rounded(len(jobs), self._places)
        anchors = [(j.tokens[-1], j.done, self._store.address(j.number)[0]) for j in jobs]
        self._anchors.tell(anchors, size)
        is_sampled = any(row[-1] for row in drawing)
        if is_sampled:
            self._drawing.tell(drawing, size)
        return self.drafted((size, is_sampled)).of(len(jobs))

    def _write(self, size: int) -> None:
        self._drafter.write_rows(self._features[:size], self._state(self._known, size))

    def _draft(self, size: Size) -> Drawn:
        requests, is_sampled = size
        state = self._state(self._anchors, requests)
        proposal = self._drafter.propose_rows(self._model, state)
        chooser = DraftChooser(
            self._num_tokens,
            self._model.config.image_token_id,
            self._drawing.there[:, :requests].T if is_sampled else None,
        )
        drafted = self._drafter.draft(proposal, chooser)
        return chooser.drawn(drafted.tokens, drafted.confidence)

    def _state(self, rows: Staged, size: int) -> DecodeState:
        token_ids, positions, places = rows.there[:, :size]
        return DecodeState(
            token_ids=token_ids,
            positions=positions,
            places=places,
            table=places[:, None][:, :0],
            page_size=self._store.cache.page_size,
            rings=self._rings,
            pages={},
            frequencies=self._frequencies,
        )


def captured_drafts(
    drafter: Drafter, model: CausalEncoderDecoder, store: PagedStore, num_tokens: int
) -> DraftSteps | None:
    """A drafter's steps that are captured, on a CUDA device; None where they cannot be."""
    if store.device.type != "cuda" or not isinstance(drafter, DSparkDrafter):
        return None
    return None if why_not(model) else DraftSteps(drafter, model, store, num_tokens)
