"""How drafts are drawn from a drafter's scores, with the chances that they had. Report §2.4.3."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from openv41 import ops
from openv41.engine.random_streams import of_drafts
from openv41.engine.sampler import Draft, Sampler, SharesRow

Drawing = tuple[float, ...]  # random numbers of a block, temperature, 1 where drafts are sampled


def drawing_of(samplers: Sequence[Sampler], block_size: int, *, is_greedy: bool) -> list[Drawing]:
    """How the drafts of each request are drawn: random numbers, temperature, whether they are.

    Sampled drafts follow the temperature of their request and nothing else of its settings: what
    they forbid is rejected when it is verified. Requests at temperature 0, or all with
    ``is_greedy``, get the likeliest tokens.
    """
    drawing = []
    for sampler in samplers:
        seed, temperature = sampler.config.seed, sampler.config.temperature
        if is_greedy or temperature == 0:
            drawing.append((*(0.0,) * block_size, 1.0, 0.0))
            continue
        drawing.append((*of_drafts(seed, sampler.place, block_size), temperature, 1.0))
    return drawing


@dataclass(frozen=True, eq=False)
class Drawn:
    """What was drawn: numbers that the host wants, and what stays on the device."""

    numbers: Float64[Tensor, "requests X kinds"]  # token, confidence, chance
    shares: Float64[Tensor, "places X V"] | None  # None where no draft was sampled

    def of(self, count: int) -> "Drawn":
        """Numbers of the first requests; chances are addressed anyway."""
        return Drawn(self.numbers[:count], self.shares)


class DraftChooser:
    """Draws the drafts of several requests, one position of all blocks after the other."""

    def __init__(
        self,
        num_tokens: int,
        banned: int,
        drawing: Float64[Tensor, "requests numbers"] | None,
    ) -> None:
        """``drawing`` is that of ``drawing_of``; None takes the likeliest tokens of all."""
        self._num_tokens, self._banned, self._drawing = num_tokens, banned, drawing
        self._shares: list[Float[Tensor, "requests V"]] = []  # by position

    def __call__(self, logits: Float[Tensor, "requests V"], step: int) -> Int[Tensor, " requests"]:
        """Choose the drafts of one position."""
        scores = logits[:, : self._num_tokens]
        if self._banned < self._num_tokens:
            scores = scores.clone()
            scores[:, self._banned].fill_(-torch.inf)
        likeliest = scores.argmax(-1)
        if self._drawing is None:
            return likeliest
        wide = scores.double()
        wide = (wide - wide.amax(-1, keepdim=True)) / self._drawing[:, -2:-1]
        self._shares.append(torch.softmax(wide, -1))
        drawn = ops.choose_tokens(self._shares[-1], self._drawing[:, step])
        return torch.where(self._drawing[:, -1] > 0, drawn, likeliest)

    def drawn(
        self, tokens: Int[Tensor, "requests X"], confidence: Float[Tensor, "requests X"]
    ) -> Drawn:
        """The chosen tokens, what their drafter thinks of them, and the chances they had."""
        chances, shares = torch.ones_like(tokens, dtype=torch.float64), None
        if self._shares:
            shares = torch.stack(self._shares, dim=1)
            chances = shares.gather(2, tokens[..., None])[..., 0]
        numbers = torch.stack([tokens.double(), confidence.double(), chances], dim=-1)
        return Drawn(numbers, shares)


def drafts_of(
    drawn: Drawn,
    numbers: Float64[np.ndarray, "requests X kinds"],
    drawing: Sequence[Drawing],
    banned: int,
) -> list[list[Draft]]:
    """Drafts of each request; ``numbers`` are those of ``drawn``, on the host.

    They end before one that no working drafter draws: a banned one, or one whose scores are not
    finite, which leaves it no chance. Nothing behind it could be accepted.
    """
    found = []
    for request, (rows, (*_, is_sampled)) in enumerate(zip(numbers.tolist(), drawing, strict=True)):
        drafts: list[Draft] = []
        for token, _, chance in rows:
            if token == banned or not 0 < chance <= 1:
                break
            if is_sampled and drawn.shares is not None:
                row = SharesRow(drawn.shares, request, len(drafts))
                drafts.append(Draft(int(token), chance, row))
            else:
                drafts.append(Draft(int(token)))
        found.append(drafts)
    return found
