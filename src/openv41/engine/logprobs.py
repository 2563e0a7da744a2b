"""Log-probabilities of tokens, with the most likely alternatives.

They are those of the model itself: log_softmax of its logits in float32, before bias, penalties,
temperature and cuts.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from openv41.engine.request import TokenLogprob
from openv41.engine.sampler import check_logits

Alternatives = tuple[TokenLogprob, ...]


def logprobs(
    logits: Float[Tensor, " V"], token: int, top: int
) -> tuple[TokenLogprob, Alternatives]:
    """Log-probability of ``token``, and the ``top`` most likely tokens, the lowest id first."""
    return row_logprobs(logits[None], [token], top)[0]


def row_logprobs(
    logits: Float[Tensor, "T V"], tokens: Sequence[int], top: int
) -> list[tuple[TokenLogprob, Alternatives]]:
    """``logprobs`` of several rows: ``tokens`` holds one for each."""
    assert len(logits) == len(tokens), f"{len(logits)} rows of logits for {len(tokens)} tokens"
    for row in (~logits.amax(-1).isfinite()).nonzero().flatten().tolist():
        check_logits(logits[row], f"row {row}")
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    own = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]  # [T, 1]
    others = [_most_likely(wide, min(top, wide.shape[1]))] if top else []
    ids = torch.cat([own, *others], dim=1)  # [T, 1+count]
    values = torch.log_softmax(wide, dim=-1).gather(1, ids)
    listed = [
        tuple(TokenLogprob(token, value) for token, value in zip(*row, strict=True))
        for row in zip(ids.tolist(), values.tolist(), strict=True)
    ]
    return [(entries[0], entries[1:]) for entries in listed]


def _most_likely(logits: Float[Tensor, "T V"], count: int) -> Int64[Tensor, "T count"]:
    """Ids of the ``count`` largest in each row, largest first, the lowest ids of equals."""
    ids = logits.topk(count).indices.sort().values
    found, order = logits.gather(1, ids).sort(descending=True, stable=True)
    ids = ids.gather(1, order)
    border = found[:, -1:]  # [T, 1]; of its equals, topk takes any
    taken = (found == border).sum(1)
    for row in ((logits == border).sum(1) > taken).nonzero().flatten().tolist():
        equal = (logits[row] == border[row]).nonzero().flatten()
        ids[row, count - taken[row] :] = equal[: taken[row]]
    return ids
