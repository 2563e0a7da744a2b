"""Log-probabilities of given tokens, with gradients, for reinforcement learning. Report §2.3.1.

A rollout chose experts and entries; a model that computes the probabilities of its tokens again
must make the same choices, or its ratio to the rollout says nothing (routing replay). An engine
records them: ``Request(record_choices=True)`` gives ``Answer.choices``, one record.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from openv41.errors import InputError
from openv41.layers.probe import Record, RecordProbe
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.ops.linear_loss import LOGITS_AT_ONCE
from openv41.plan import plan_layers
from openv41.train.packed_batch import PackedBatch
from openv41.train.step import next_tokens


def token_log_probs(
    model: CausalEncoderDecoder,
    packed: PackedBatch,
    records: Sequence[Record | None] | None = None,
    *,
    num_tokens: int | None = None,
    recompute: bool = False,
) -> Float[Tensor, " T"]:
    """Natural logarithm of each token's probability given its document before it; 0 for the first.

    ``records`` holds the choices of each document, or None where they are free. A record ends where
    the rollout did, which did not run the model on its last token; later rows are free. Gradients
    reach all that the choices leave: the routers by the weights of the chosen experts, but not the
    indexers. They are at temperature 1 over the first ``num_tokens`` of the vocabulary, as an
    engine's are over its tokenizer's; None is all of it. The head and, with ``recompute``, the
    layers run again in the backward pass.

    Raises InputError for records that are not of this model and these documents.
    """
    if records is not None:
        _check(model, packed, records)
    batch = packed.for_model(model)
    probe = None if records is None else RecordProbe(batch, records)
    hidden = model(batch, probe=probe, replay=packed.replay, recompute=recompute).hidden
    rows, targets = next_tokens(batch.token_ids, packed.lengths)
    size = max(1, LOGITS_AT_ONCE // model.config.vocab_size)

    def score(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = model.logits(hidden)[:, :num_tokens]
        return logits.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]

    pieces = [
        checkpoint(score, hidden[own], wanted, use_reentrant=False, preserve_rng_state=False)
        for own, wanted in zip(rows.split(size), targets.split(size), strict=True)
    ]
    values = torch.cat(pieces)
    return values.new_zeros(len(batch.token_ids)).index_put((rows + 1,), values)


def _check(
    model: CausalEncoderDecoder, packed: PackedBatch, records: Sequence[Record | None]
) -> None:
    """Refuse records of other models, or of other texts."""
    if len(records) != len(packed.lengths):
        raise InputError(
            f"{len(records)} records for {len(packed.lengths)} documents; give one per document, "
            "None where its choices are free"
        )
    choices = {choice.name: choice for choice in _choices(model)}
    for place, (record, length) in enumerate(zip(records, packed.lengths, strict=True)):
        for name, rows in (record or {}).items():
            if name not in choices:
                raise InputError(
                    f"records[{place}] holds {name!r}, this model chooses {', '.join(choices)}; "
                    "give records of this model"
                )
            if len(rows) > length:
                raise InputError(
                    f"records[{place}] has {len(rows)} rows of {name}, its document {length} "
                    "tokens; give the record of this document"
                )
            if not choices[name].allows(rows):
                raise InputError(
                    f"records[{place}] holds ids of {name} that this model cannot choose there; "
                    "give the record of this model and document"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """What a layer chooses: ``top_k`` of ``num_experts``, or entries of ``ratio`` tokens each."""

    name: str
    top_k: int = 0
    num_experts: int = 0
    ratio: int = 0

    def allows(self, rows: Int[Tensor, "rows K"]) -> bool:
        """Whether rows of positions 0, 1, ... may have been chosen."""
        if self.ratio:
            visible = (torch.arange(len(rows), device=rows.device) + 1) // self.ratio
            return bool(((rows >= -1) & (rows < visible[:, None])).all())
        in_range = ((rows >= 0) & (rows < self.num_experts)).all()
        return rows.shape[1] == self.top_k and bool(in_range)


def _choices(model: CausalEncoderDecoder) -> Iterator[_Choice]:
    moe = model.config.moe
    for plan in plan_layers(model.config):
        name = f"layers.{plan.layer}"
        yield _Choice(name=f"{name}.expert_ids", top_k=moe.top_k, num_experts=moe.num_experts)
        if plan.is_index_source:
            yield _Choice(name=f"{name}.topk_indices", ratio=plan.ratio)
