"""What traces are made of: margins of choices, single steps, stored dtypes. Report §2.1."""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from openv41 import ops
from openv41.layers.batch import Batch
from openv41.layers.probe import CHOICES, Probe
from openv41.model.cache import DenseStore
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.plan import LayerPlan


def selection_margins(
    model: CausalEncoderDecoder,
    plan: LayerPlan,
    seen: Mapping[str, Tensor],
    fed: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Last row of the index scores, and how close the choices of an index source were."""
    name, indexer = f"layers.{plan.layer}", model.config.indexer
    scores = seen[f"{name}.index_scores"]
    allowed = visible_entries(scores, plan.ratio)
    pool_name = f"layers.{plan.kv_source}.candidate_mask"
    if plan.uses_candidates:
        allowed &= fed.get(pool_name, seen[pool_name])
    found = {
        f"{name}.index_score_row_last": scores[-1],
        f"{name}.topk_margin": margin_of(scores.masked_fill(~allowed, -torch.inf), indexer.top_k),
    }
    if plan.publishes_candidates:
        blocks = ops.block_scores(
            scores, visible_entries(scores, plan.ratio).sum(1), indexer.block_size
        )
        found[f"{name}.candidate_margin"] = margin_of(blocks, indexer.candidate_blocks)
    return found


def visible_entries(scores: Tensor, ratio: int) -> Bool[Tensor, "T M"]:
    """Entries whose group is complete at each token of a request that starts at position 0."""
    device = scores.device
    complete = (torch.arange(len(scores), device=device) + 1) // ratio
    return torch.arange(scores.shape[1], device=device) < complete[:, None]


def margin_of(scores: Float[Tensor, "T M"], count: int) -> Float[Tensor, " T"]:
    """Last chosen score less first rejected one; inf where nothing is rejected."""
    if scores.shape[1] <= count:
        return scores.new_full((len(scores),), torch.inf)
    best = scores.topk(count + 1, dim=1).values
    last, rejected = best[:, count - 1], best[:, count]
    return torch.where(rejected == -torch.inf, torch.inf, last - rejected)


def feed_tokens(
    model: CausalEncoderDecoder, store: DenseStore, ids: Tensor, start: int
) -> tuple[Float[Tensor, " V"], dict[str, Tensor]]:
    """Feed tokens of request 0; return the last logits, the discrete choices and the taps."""
    probe = Probe(lambda name: leaf(name) in (*CHOICES, "main_hidden"))
    output = model(Batch(ids, (0,), (start,), (len(ids),)), store, probe=probe)
    return model.logits(output.hidden[-1:])[0], probe.values


def one_request(ids: Int[Tensor, " S"]) -> Batch:
    """Make a batch of one document."""
    return Batch.packed(ids, [len(ids)])


def widen(ids: Int[Tensor, "T K"], width: int) -> Int[Tensor, "T _"]:
    """Fill rows of ids up with -1."""
    return torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=-1)


def leaf(name: str) -> str:
    """Last part of a dotted name."""
    return name.rpartition(".")[2]


def as_input(value: Tensor) -> Tensor:
    """Ids as the model uses them."""
    if value.dtype == torch.uint8:
        return value.bool()
    return value if value.is_floating_point() else value.long()


def as_stored(value: Tensor) -> Tensor:
    """Ids and masks as the golden files keep them."""
    if value.dtype == torch.bool:
        return value.to(torch.uint8)
    return value if value.is_floating_point() else value.to(torch.int32)
