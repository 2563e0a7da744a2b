"""Two traces side by side: where they part, by how much, and which choices were ties.

Bounds follow the golden data: float32 results may differ by rounding noise, discrete results not
at all, except where the scores of two choices were exactly equal. Report §2.1.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openv41.errors import InputError
from openv41.io.tensor_files import read_metadata, read_tensors

SHOWN_ROWS = 8  # differing rows of a tensor that are listed one by one

_MARGINS = {
    "topk_indices": "topk_margin",
    "candidate_mask": "candidate_margin",
    "expert_ids": "router_margin",
    "greedy_tokens": "greedy_margin",
}
_FIRST = ("subset_positions", "positions", "embed", "engram_hash_ids")
_IN_LAYER = (
    *("engram_gate", "after_engram", "window_kv", "main_kv", "index_k", "index_score_row_last"),
    *("candidate_margin", "candidate_mask", "topk_margin", "topk_indices", "attn_out"),
    *("router_margin", "expert_ids", "expert_weights", "ffn_out", "out", "pre_mix_out"),
)
_LAST = ("main_hidden", "expert_ids", "final_hidden", "logits")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What counts as equal. A None is not checked; shares are of rows."""

    max_abs: float | None = None
    mean_abs_logits: float | None = None
    mean_over_std: float | None = None
    rows_differing: float = 0.0
    argmax_agreement: float = 0.0


BOUNDS = {
    "f32": Bounds(max_abs=2e-4),
    "f32qat": Bounds(
        mean_abs_logits=0.02, mean_over_std=0.05, rows_differing=0.05, argmax_agreement=0.98
    ),
    "released": Bounds(mean_over_std=5e-5),
    "released-gpu": Bounds(mean_over_std=0.03, rows_differing=0.03),
}


@dataclass(frozen=True, kw_only=True)
class RowDifference:
    """A row whose choices differ. ``margin`` is None where no file holds it."""

    row: int
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]
    margin: float | None

    @property
    def is_tie(self) -> bool:
        """Whether the last chosen and the first rejected score were exactly equal."""
        return self.margin == 0


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """One tensor of both files. ``status``: equal, within, tie, differs, only in a, only in b."""

    name: str
    status: str
    max_abs: float | None = None
    mean_abs: float | None = None
    mean_over_std: float | None = None
    argmax_agreement: float | None = None
    rows_differing: int | None = None
    ties: int | None = None
    rows: tuple[RowDifference, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All tensors in forward order."""

    bounds: str
    tensors: tuple[TensorDifference, ...] = field(repr=False)

    @property
    def is_equal(self) -> bool:
        """Whether everything is within the bounds; exact ties count as equal."""
        return all(t.status in ("equal", "within", "tie") for t in self.tensors)

    @property
    def first(self) -> TensorDifference | None:
        """First tensor in forward order that is out of bounds, or whose ties fell another way."""
        both = (t for t in self.tensors if t.status in ("differs", "tie"))
        return next(both, None)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "equal": self.is_equal,
            "bounds": self.bounds,
            "first_divergence": self.first.name if self.first else None,
            "tensors": [_finite(asdict(tensor)) for tensor in self.tensors],
        }


def compare_files(
    path_a: Path, path_b: Path, *, bounds: str | None = None, common: bool = False
) -> Comparison:
    """Compare two files; ``bounds`` names the rules, by default those of the files' numerics."""
    a, b = read_tensors(path_a), read_tensors(path_b)
    if not a.keys() & b.keys():
        raise InputError(f"{path_a} and {path_b} have no tensor in common")
    name = bounds or _numerics_of(path_a) or _numerics_of(path_b) or "f32"
    if name not in BOUNDS:
        raise InputError(f"bounds are {name!r}, must be one of {', '.join(BOUNDS)}")
    return compare_tensors(a, b, bounds=name, common=common)


def compare_tensors(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], *, bounds: str, common: bool = False
) -> Comparison:
    """Compare tensors by name; ``common`` leaves out what only one side has."""
    names = a.keys() & b.keys() if common else a.keys() | b.keys()
    found = []
    for name in sorted(names, key=forward_place):
        if name not in a or name not in b:
            found.append(TensorDifference(name=name, status=f"only in {'a' if name in a else 'b'}"))
        elif a[name].shape != b[name].shape:
            reason = f"shapes {list(a[name].shape)} and {list(b[name].shape)}"
            found.append(TensorDifference(name=name, status="differs", reason=reason))
        elif a[name].is_floating_point() and b[name].is_floating_point():
            found.append(_compare_floats(name, a, b, BOUNDS[bounds]))
        else:
            found.append(_compare_choices(name, a, b, BOUNDS[bounds]))
    return Comparison(bounds=bounds, tensors=tuple(found))


def _finite(value: Any) -> Any:  # noqa: ANN401 -- nested JSON data
    """JSON has no infinity: write it as text."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def forward_place(name: str) -> tuple[int, int, int, str]:
    """Sort key: the order in which a forward makes the tensors."""
    if match := re.fullmatch(r"layers\.(\d+)\.(\w+)", name):
        kind = match[2]
        place = _IN_LAYER.index(kind) if kind in _IN_LAYER else len(_IN_LAYER)
        return 1, int(match[1]), place, name
    if name in _FIRST:
        return 0, _FIRST.index(name), 0, name
    return 2, _LAST.index(name) if name in _LAST else len(_LAST), 0, name


def _numerics_of(path: Path) -> str | None:
    """Numerics that a trace names in its metadata, or a golden file in its name."""
    named = read_metadata(path).get("numerics") or path.stem.rpartition("_")[2]
    return {"f64": "f32"}.get(named, named if named in BOUNDS else None)


def _compare_floats(
    name: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor], bounds: Bounds
) -> TensorDifference:
    left, right = a[name].double(), b[name].double()
    if name.endswith("expert_weights"):
        left, right = _same_experts(name, a, b)
    error = torch.where(left == right, 0, (left - right).abs())
    if error.isnan().any():
        nans = (int(side.isnan().sum()) for side in (left, right))
        reason = "values that are NaN: {} in a, {} in b".format(*nans)
        return TensorDifference(name=name, status="differs", reason=reason)
    if not error.numel():
        return TensorDifference(name=name, status="equal")
    finite = left[left.isfinite()]
    spread = float(finite.std(correction=0)) if finite.numel() else 0.0
    mean = float(error.mean())
    relative = mean / spread if spread else (0.0 if mean == 0 else torch.inf)
    agreement = None
    if name.endswith("logits") and left.ndim > 1:
        agreement = float((left.argmax(-1) == right.argmax(-1)).double().mean())
    found = TensorDifference(
        name=name,
        status="within" if error.any() else "equal",
        max_abs=float(error.max()),
        mean_abs=mean,
        mean_over_std=relative,
        argmax_agreement=agreement,
    )
    broken = _broken_bound(found, bounds)
    return replace(found, status="differs", reason=broken) if broken else found


def _broken_bound(found: TensorDifference, bounds: Bounds) -> str:
    """Say which bound an error breaks, or nothing."""
    numbers = (found.max_abs, found.mean_abs, found.mean_over_std)
    largest, mean, relative = (math.nan if n is None else n for n in numbers)
    agreement = found.argmax_agreement
    if bounds.max_abs is not None and largest > bounds.max_abs:
        return f"max {largest:.3g} above {bounds.max_abs:g}"
    if agreement is not None and agreement < bounds.argmax_agreement:
        return f"argmax agrees in {agreement:.2%} of rows, must in {bounds.argmax_agreement:.0%}"
    if found.name.endswith("logits") and bounds.mean_abs_logits is not None:
        broken = mean > bounds.mean_abs_logits
        return f"mean {mean:.3g} above {bounds.mean_abs_logits:g}" if broken else ""
    if bounds.mean_over_std is not None and relative > bounds.mean_over_std:
        return f"mean {relative:.3g} x std above {bounds.mean_over_std:g} x std"
    return ""


def _same_experts(
    name: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Weights in the order of expert ids, of the rows where both sides chose the same experts."""
    ids = name.replace("weights", "ids")
    if ids not in a or ids not in b:
        return a[name].double(), b[name].double()
    (ids_a, order_a), (ids_b, order_b) = a[ids].sort(dim=-1), b[ids].sort(dim=-1)
    same = (ids_a == ids_b).all(dim=-1)
    left, right = a[name].gather(-1, order_a.long()), b[name].gather(-1, order_b.long())
    return left[same].double(), right[same].double()


def _compare_choices(
    name: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor], bounds: Bounds
) -> TensorDifference:
    kind = name.rpartition(".")[2]
    left, right = _as_rows(kind, a[name]), _as_rows(kind, b[name])
    rows = (left != right).any(dim=1).nonzero().flatten().tolist()
    margins = [m for m in (_margin(name, side, len(left)) for side in (a, b)) if m is not None]
    found = [_row_difference(kind, row, left, right, margins) for row in rows]
    ties = sum(difference.is_tie for difference in found)
    real = len(found) - ties
    broken = real > bounds.rows_differing * len(left)
    status = "differs" if broken else "within" if real else "tie" if ties else "equal"
    return TensorDifference(
        name=name,
        status=status,
        rows_differing=len(rows),
        ties=ties,
        rows=tuple(sorted(found, key=lambda d: d.is_tie)[:SHOWN_ROWS]),
        reason=f"{real} of {len(left)} rows differ" if broken else "",
    )


def _as_rows(kind: str, value: Tensor) -> Tensor:
    """One row per token; sets sorted, and entries that a query cannot see cleared."""
    if value.ndim == 1:
        return value.long()[:, None]
    value = value.long()
    if kind in ("topk_indices", "expert_ids"):
        value = value.sort(dim=-1).values
    if kind == "candidate_mask":
        tokens, entries = value.shape
        ratio = max(1, tokens // max(1, entries))
        visible = (torch.arange(tokens) + 1) // ratio
        value = value.masked_fill(torch.arange(entries) >= visible[:, None], 0)
    return value.flatten(1)


def _margin(name: str, side: Mapping[str, Tensor], rows: int) -> Tensor | None:
    stem, _, kind = name.rpartition(".")
    margin = side.get(f"{stem}.{_MARGINS.get(kind, '')}" if stem else _MARGINS.get(kind, ""))
    return margin if margin is not None and margin.shape == (rows,) else None


def _row_difference(
    kind: str, row: int, left: Tensor, right: Tensor, margins: list[Tensor]
) -> RowDifference:
    chosen = [side[row] for side in (left, right)]
    if kind == "candidate_mask":
        chosen = [side.nonzero().flatten() for side in chosen]
    set_a, set_b = ({int(i) for i in side if i >= 0} for side in chosen)
    return RowDifference(
        row=row,
        only_a=tuple(sorted(set_a - set_b)),
        only_b=tuple(sorted(set_b - set_a)),
        margin=min((float(m[row]) for m in margins), default=None),
    )
