"""The kernel of ``packed_index_scores``. Report §2.3.1, §2.4.4."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
from torch import Tensor

from openv41.ops._dispatch import kernel
from openv41.ops.index_scores_triton import ROW_BYTES, packed_scores


def _refuse(q, weights, keys, table, visible, per_page, num_entries) -> str | None:
    """Say what the kernel cannot take."""
    if q.shape[3] != ROW_BYTES.value or keys.shape[1] != ROW_BYTES.value:
        return f"packed rows are of {q.shape[3]} and {keys.shape[1]} bytes, not {ROW_BYTES.value}"
    if q.shape[2] > 128:
        return f"{q.shape[2]} heads are more than a program holds"
    if keys.stride(1) != 1 or keys.stride(0) != ROW_BYTES.value:
        return "keys are not contiguous"
    return None


@kernel(refuse=_refuse)
@torch.no_grad()
def packed_index_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: Tensor,
    visible: Tensor,
    per_page: int,
    num_entries: int,
) -> Tensor:
    """Unpack each key in registers, once for the queries of a request."""
    return packed_scores(q, weights, keys, table, visible, per_page, num_entries)
