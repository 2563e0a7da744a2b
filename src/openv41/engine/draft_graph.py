"""A drafter's blocks as CUDA graphs. Report §2.4.3.

As in ``decode_graph.py``, whose steps store what blocks read: everything lies where it lay when it
was captured, and sizes are rounded up by repeating the last row.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from openv41.engine.captured import Captured, Staged, rounded, sizes_up_to
from openv41.engine.decode_graph import stored_frequencies, stored_rings, why_not
from openv41.engine.draft_choice import DraftChooser, Drawing, Drawn
from openv41.engine.draw_graph import MOST_ELEMENTS
from openv41.engine.job import Job
from openv41.engine.paged_store import PagedStore
from openv41.engine.speculation import Drafter
from openv41.layers.decode_context import DecodeState
from openv41.layers.store import Slot
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.dspark import DSparkDrafter

Size = tuple[int, bool]  # requests, and whether any of their drafts is sampled


class DraftSteps:
    """Lets a drafter draft behind requests."""

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
        self._first = Slot("window", model.config.num_layers)
        self._rings = stored_rings(store)
        self._frequencies = stored_frequencies(model, device)
        self._anchors = Staged(3, self._places, device)
        self._drawing = Staged(drafter.block_size + 2, self._places, device, torch.float64)
        kept = min(self._places, MOST_ELEMENTS // num_tokens), drafter.block_size, num_tokens
        self.block = torch.zeros(kept, dtype=torch.float64, device=device)  # chances of drafts
        self.drafted: Captured[Size, Drawn] = Captured(self._draft, device, captures=captures)

    def prepare(self) -> None:
        """Capture drafts of every number of requests, for which all must be at rest."""
        self._anchors.tell([(0, 0, 0)], self._places)
        self._drawing.tell([(*(0.5,) * self._drafter.block_size, 1.0, 1.0)], self._places)
        self.drafted.prepare(itertools.product(sizes_up_to(self._places), (False, True)))

    def knows(self, jobs: Sequence[Job]) -> bool:
        """Whether the rings hold all that the drafter reads of these requests."""
        window = self._model.config.attention.window_size
        asked = tuple(job.number for job in jobs), tuple(job.done for job in jobs)
        found = self._store.rows_before(self._first, *asked)
        return all(n >= min(job.done, window) for n, job in zip(found, jobs, strict=True))

    def draft(self, jobs: Sequence[Job], drawing: Sequence[Drawing]) -> Drawn:
        """Draft a block behind the newest token of each job."""
        size = rounded(len(jobs), self._places)
        anchors = [(j.tokens[-1], j.done, self._store.address(j.number)[0]) for j in jobs]
        self._anchors.tell(anchors, size)
        is_sampled = any(row[-1] for row in drawing)
        if is_sampled:
            self._drawing.tell(drawing, size)
        return self.drafted((size, is_sampled)).of(len(jobs))

    def _draft(self, size: Size) -> Drawn:
        requests, is_sampled = size
        token_ids, positions, places = self._anchors.there[:, :requests]
        state = DecodeState(
            token_ids=token_ids,
            positions=positions,
            places=places,
            table=places[:, None][:, :0],
            page_size=self._store.cache.page_size,
            rings=self._rings,
            pages={},
            frequencies=self._frequencies,
        )
        proposal = self._drafter.propose_rows(self._model, state)
        chooser = DraftChooser(
            self._num_tokens,
            self._model.config.image_token_id,
            self._drawing.there[:, :requests].T if is_sampled else None,
        )
        drafted = self._drafter.draft(proposal, chooser)
        drawn = chooser.drawn(drafted.tokens, drafted.confidence)
        if drawn.shares is None or requests > len(self.block):
            return drawn
        self.block[:requests] = drawn.shares
        return replace(drawn, shares=self.block)


def captured_drafts(
    drafter: Drafter, model: CausalEncoderDecoder, store: PagedStore, num_tokens: int
) -> DraftSteps | None:
    """A drafter's steps that are captured, on a CUDA device; None where they cannot be."""
    if store.device.type != "cuda" or not isinstance(drafter, DSparkDrafter):
        return None
    return None if why_not(model) else DraftSteps(drafter, model, store, num_tokens)
