"""What the drafter says after each token of a decode, under the golden names. Report §2.4.3."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from openv41.layers.batch import Batch
from openv41.model.cache import DenseStore
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder


class DraftTrace:
    """Drafts greedily behind the most likely token of each step of request 0."""

    def __init__(self, model: CausalEncoderDecoder, store: DenseStore) -> None:
        self.model, self.store = model, store
        self.steps: list[dict[str, Tensor]] = []

    def commit(self, ids: Tensor, start: int, seen: Mapping[str, Tensor]) -> None:
        """Give the drafter the features of tokens that were fed."""
        if self.model.drafter is not None:
            fed = Batch(ids, (0,), (start,), (len(ids),))
            self.model.drafter.write_context(seen["main_hidden"], fed, self.store)

    def draft(self, logits: Float[Tensor, " V"], position: int) -> None:
        """Draft a block behind the token that ``logits`` choose for ``position``."""
        drafter = self.model.drafter
        if drafter is None:
            return
        anchors = Batch(logits.argmax()[None], (0,), (position,), (1,))
        proposal = drafter.propose(self.model, anchors, self.store)
        found = drafter.draft(proposal)
        self.steps.append(
            {
                "dspark_tokens": torch.cat([anchors.token_ids, found.tokens[0]]),
                "dspark_base_logits": proposal.base_logits,
                "dspark_logits": found.logits[0],
                "dspark_confidence": found.confidence[0],
            }
        )

    def tensors(self) -> dict[str, Tensor]:
        """A row per step; nothing where the model has no drafter."""
        names = self.steps[0] if self.steps else ()
        return {name: torch.stack([step[name] for step in self.steps]) for name in names}
