"""Where the rows of a decode step stand: in rings, and in groups of main KV. Report §2.3.1."""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from openv41.ops._dispatch import op


class Groups(NamedTuple):
    """The group of each row's position; integers."""

    visible: Tensor  # [T], entries whose group is complete at the row
    first_rows: Tensor  # [T], t * width
    first_positions: Tensor  # [T], of the group
    members: Tensor  # [T, ratio], rows of [pending rows, rows] that make its entry


@op
def ring_rows(
    places: Int[Tensor, " T"], positions: Int[Tensor, " T"], reach: int, size: int
) -> tuple[Int[Tensor, " T"], Int[Tensor, "T reach"]]:
    """Own row of each position in rings of ``size``, and those of the last ``reach``.

    Oldest first, itself last; -1 before position 0. Position p of a place is its row p mod size.
    """
    at = positions[:, None] + torch.arange(1 - reach, 1, device=positions.device)
    rows = torch.where(at < 0, -1, places[:, None] * size + at % size)
    return rows[:, -1], rows


@op
def group_rows(
    places: Int[Tensor, " T"], positions: Int[Tensor, " T"], ratio: int, width: int
) -> Groups:
    """The groups of ``ratio`` positions that rows are in.

    Where the next row is the next position of the same place and completes the group, the entry is
    made of that row and its pending one; else of the row and its own.
    """
    follows = (places[1:] == places[:-1]) & (positions[1:] == positions[:-1] + 1)
    follows = torch.nn.functional.pad(follows, (0, 1))
    numbers = torch.arange(len(places), device=places.device)
    last = numbers + follows * (positions % ratio == 0) * (ratio > 1)
    parts = len(places) * torch.arange(2 - ratio, 2, device=places.device)
    first = positions // ratio * ratio
    return Groups((positions + 1) // ratio, numbers * width, first, last[:, None] + parts)
