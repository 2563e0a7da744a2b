"""How an engine speculates, and what it asks of a drafter. Report §2.4.3.

A round of a request: its newest token (the anchor, at position P) has no KV yet; the drafter
proposes what follows, the model computes the anchor and the drafts to be verified in one forward,
and the request goes on behind those that hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from openv41.layers.batch import Batch
from openv41.layers.store import KVStore
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.dspark import Choose


class DraftChoice(StrEnum):
    """How drafts are taken from the drafter's scores."""

    SAMPLED = "sampled"  # at the temperature of the request: more of them hold
    GREEDY = "greedy"  # the likeliest: a sampled answer is to the token that without speculation


class VerifyRule(StrEnum):
    """How drafts are accepted; both leave the distribution of answers as it is."""

    TOKENS = "tokens"  # one by one
    BLOCK = "block"  # together: no fewer are accepted on average


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationConfig:
    """How an engine with a drafter speculates."""

    drafts: DraftChoice = DraftChoice.SAMPLED
    rule: VerifyRule = VerifyRule.TOKENS


@runtime_checkable
class Drafted(Protocol):
    """What a drafter answers, a row per anchor."""

    @property
    def tokens(self) -> Int[Tensor, "requests X"]:
        """What ``choose`` took."""
        ...

    @property
    def confidence(self) -> Float[Tensor, "requests X"]:
        """Logits: that a draft holds if those before it do."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens from what the model's forwards leave, and keeps its state in their store."""

    @property
    def block_size(self) -> int:
        """Drafts per request, always that many."""
        ...

    @property
    def num_stages(self) -> int:
        """Layers behind the model's that have a window KV in the store."""
        ...

    def write_context(
        self,
        taps: Float[Tensor, "rows width"],
        tap_batch: Batch,
        store: KVStore,
        stops: Sequence[int] | None = None,
    ) -> None:
        """Take the taps of positions below each request's ``stops``."""
        ...

    def propose(  # what it returns is the drafter's own
        self, target: CausalEncoderDecoder, anchors: Batch, store: KVStore
    ) -> Any:  # noqa: ANN401
        """Compute what follows each anchor; ``draft`` makes tokens of it."""
        ...

    def draft(self, proposal: Any, choose: Choose) -> Drafted:  # noqa: ANN401
        """Let ``choose`` take a token of each row of logits, draft after draft."""
        ...


@runtime_checkable
class Speculator(Protocol):
    """Decides, step by step, whether to draft and how many drafts of each request to verify.

    What it says of draft k of a request may depend on the drafts before k, on other requests and on
    earlier steps, never on draft k itself or those behind it: else answers would be biased.
    Requests are known by numbers that are never used again.
    """

    def plan(self, requests: Sequence[int]) -> bool:
        """Say whether this step drafts for these requests, all that decode in it."""
        ...

    def lengths(
        self,
        requests: Sequence[int],
        logits: Float[np.ndarray, "requests X"],
        limits: Sequence[int],
    ) -> Sequence[int]:
        """Drafts to verify of each request, at most its limit, from raw confidence logits.

        Asked once in a step for which ``plan`` said yes. Fewer are verified where the step has no
        room or the cache no page for them.
        """
        ...

    def verified(
        self, requests: Sequence[int], lengths: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Hear how many drafts of each request were verified and accepted.

        This ends every step, also one without drafts, which has no requests here. Steps end in
        their order; where they are replayed from graphs, the next one is planned before.
        """
        ...

    def forget(self, request: int) -> None:
        """Drop what is known of a request that has ended."""
        ...


class VerifyAll:
    """Drafts in every step and verifies every draft."""

    def plan(self, requests: Sequence[int]) -> bool:
        """Say that this step drafts."""
        return bool(requests)

    def lengths(
        self,
        requests: Sequence[int],
        logits: Float[np.ndarray, "requests X"],
        limits: Sequence[int],
    ) -> Sequence[int]:
        """As many as may be verified."""
        return limits

    def verified(
        self, requests: Sequence[int], lengths: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Take no notice."""

    def forget(self, request: int) -> None:
        """Nothing is known."""
