"""From logits to the next token."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from openv41.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How a token is drawn; temperature 0 takes the most likely one."""

    temperature: float = 1.0
    top_k: int | None = None  # of all tokens, only the k most likely ones
    top_p: float = 1.0  # only the fewest tokens that hold this share of the probability
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.temperature < float("inf"):
            problems.append(f"temperature is {self.temperature}, must be at least 0")
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"top_k is {self.top_k}, must be at least 1; leave it out for all")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p is {self.top_p}, must be above 0 and at most 1")
        if not 0 <= self.seed < 1 << 63:
            problems.append(f"seed is {self.seed}, must be from 0 to 2^63 - 1")
        if problems:
            raise ConfigError("sampling", problems)


class Sampler:
    """Draws tokens; equal seeds and logits give equal tokens."""

    def __init__(self, config: SamplingConfig) -> None:
        self.config = config
        self._generator = torch.Generator().manual_seed(config.seed)

    def draw(self, logits: Float[Tensor, " V"]) -> int:
        """Pick the next token; the lowest id among equals comes first."""
        if self.config.temperature == 0:
            return int((logits == logits.max()).nonzero()[0])
        scores = logits.double().cpu()
        scores = (scores - scores.max()) / self.config.temperature  # no overflow near 0
        scores, order = scores.sort(descending=True, stable=True)
        shares = keep(torch.softmax(scores, dim=0), self.config.top_k, self.config.top_p)
        total = shares.cumsum(0)
        point = torch.rand(1, generator=self._generator, dtype=torch.float64) * total[-1]
        place = int(torch.searchsorted(total, point, right=True))
        return int(order[min(place, len(order) - 1)])


def keep(shares: Float[Tensor, " V"], top_k: int | None, top_p: float) -> Float[Tensor, " kept"]:
    """Cut descending probabilities to the first ``top_k``, then to those that reach ``top_p``."""
    shares = shares[:top_k]
    before = shares.cumsum(0) - shares
    return shares[before < top_p * shares.sum()]
