"""How drafts are drawn from a drafter's scores, with the chances that they had. Report §2.4.3."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openv41 import ops
from openv41.engine.random_streams import Stream, uniform
from openv41.engine.sampler import Draft, Sampler


class DraftChooser:
    """Draws the drafts of several requests, one position of all blocks after the other.

    Sampled drafts follow the temperature of their request and nothing else of its settings: what
    they forbid is rejected when it is verified. Requests at temperature 0, or all with
    ``is_greedy``, get the likeliest tokens.
    """

    def __init__(
        self,
        samplers: Sequence[Sampler],
        block_size: int,
        *,
        banned: int,
        is_greedy: bool,
        device: torch.device,
    ) -> None:
        self._num_tokens, self._banned = samplers[0].num_tokens, banned
        self._is_sampled = [not is_greedy and s.config.temperature > 0 for s in samplers]
        self._shares: list[Float[Tensor, "requests V"]] = []  # by position
        if any(self._is_sampled):
            points = [
                [uniform(s.config.seed, Stream.DRAFT, s.place, k) for k in range(block_size)]
                for s in samplers
            ]
            self._points = torch.tensor(points, dtype=torch.float64, device=device)
            self._temperatures = torch.tensor(
                [s.config.temperature or 1.0 for s in samplers], dtype=torch.float64, device=device
            )
            self._where = torch.tensor(self._is_sampled, device=device)

    def __call__(self, logits: Float[Tensor, "requests V"], step: int) -> Int[Tensor, " requests"]:
        """Choose the drafts of one position."""
        scores = logits[:, : self._num_tokens]
        if self._banned < self._num_tokens:
            scores = scores.clone()
            scores[:, self._banned] = -torch.inf
        likeliest = scores.argmax(-1)
        if not any(self._is_sampled):
            return likeliest
        wide = scores.double()
        wide = (wide - wide.amax(-1, keepdim=True)) / self._temperatures[:, None]
        self._shares.append(torch.softmax(wide, -1))
        drawn = ops.choose_tokens(self._shares[-1], self._points[:, step])
        return torch.where(self._where, drawn, likeliest)

    def drafts(self, tokens: Int[Tensor, "requests X"]) -> list[list[Draft]]:
        """The chosen tokens with their chances, of each request.

        They end before one that no working drafter draws: scores that are not finite leave it no
        chance. Nothing behind it could be accepted.
        """
        listed = tokens.tolist()
        if not self._shares:
            return [[Draft(token) for token in self._allowed(row)] for row in listed]
        shares = torch.stack(self._shares, dim=1)  # [requests, X, V]
        chances = shares.gather(2, tokens[..., None])[..., 0].tolist()
        found = []
        for number, row in enumerate(listed):
            if not self._is_sampled[number]:
                found.append([Draft(token) for token in self._allowed(row)])
                continue
            usable = next((k for k, c in enumerate(chances[number]) if not 0 < c <= 1), len(row))
            found.append(
                [Draft(row[k], chances[number][k], shares[number, k]) for k in range(usable)]
            )
        return found

    def _allowed(self, tokens: Sequence[int]) -> Sequence[int]:
        """Drafts before the first one that is banned: of scores that are no numbers."""
        return tokens[: next((k for k, t in enumerate(tokens) if t == self._banned), len(tokens))]
