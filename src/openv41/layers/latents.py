"""Rows on their way into a cache: normed, rotated and rounded. Report §2.3.1, §2.4.4."""

from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Complex, Float
from torch import Tensor

from openv41 import ops
from openv41.config import NumericsConfig
from openv41.layers.quantized_linear import RMSNorm
from openv41.layers.rounding import round_index, round_main_kv, round_window_kv
from openv41.layers.store import Place
from openv41.ops._dispatch import wants_gradient

ROUND = {"window": round_window_kv, "main": round_main_kv, "index": round_index}


@dataclass(frozen=True, eq=False)
class Latents:
    """Rows of one kind of state (``window``, ``main`` or ``index``) before anything is done."""

    kind: str
    rows: Float[Tensor, "T C"]
    norm: RMSNorm | None  # None: normed already
    rope: Complex[Tensor, "T pairs"]
    numerics: NumericsConfig

    @cached_property
    def unrounded(self) -> Float[Tensor, "T C"]:
        """Normed and rotated."""
        normed = self.rows if self.norm is None else self.norm(self.rows)
        return ops.rotate(normed, self.rope, deterministic=self.numerics.deterministic)

    @cached_property
    def rounded(self) -> Float[Tensor, "T C"]:
        """The values that a cache gives back."""
        return ROUND[self.kind](self.unrounded, self.numerics)

    @property
    def want_gradient(self) -> bool:
        """Whether autograd records what happens to the rows; packing has no gradient."""
        weights = [] if self.norm is None else [self.norm.weight]
        return wants_gradient(self.rows, *weights)

    def pack_into(self, place: Place) -> Float[Tensor, "T C"]:
        """Store the packed rows where a cache wants them; returns their values."""
        return ops.write_latents(
            place.stored,
            place.rows,
            self.rows,
            None if self.norm is None else self.norm.weight,
            1.0 if self.norm is None else self.norm.eps,
            self.rope,
            place.form,
            deterministic=self.numerics.deterministic,
        )
