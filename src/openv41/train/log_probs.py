"""Log-probabilities of given tokens, with gradients, for reinforcement learning. Report §2.3.1.

A rollout chose experts and entries; a model that computes the probabilities of its tokens again
must make the same choices, or its ratio to the rollout says nothing (routing replay). An engine
records them: ``Request(record_choices=True)`` gives ``Answer.choices``, one record.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from openv41.errors import InputError
from openv41.layers.probe import Record, RecordProbe
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.recorded_choices import problems_of
from openv41.ops.linear_loss import rows_at_once
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
    size = rows_at_once(model.config.vocab_size, is_cuda=hidden.is_cuda)

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
    for place, (record, length) in enumerate(zip(records, packed.lengths, strict=True)):
        if problems := problems_of(record or {}, model.config, length):
            raise InputError(
                f"records[{place}]: {problems[0]}; give the record of this model and document"
            )
