"""Random numbers of a request by what they are for and where: streams that share nothing.

A number is a function of its key, so that it does not matter who else runs, how often a position is
computed, or in which order numbers are asked for. A hash brings eight of them.
"""

from enum import IntEnum
from hashlib import blake2b
from struct import Struct

_KEY, _WORDS = Struct("<3Q"), Struct("<8Q")


class Stream(IntEnum):
    """What a random number decides."""

    TOKEN = 0  # the next token, drawn from what the model says
    COIN = 1  # whether a draft is accepted
    RESIDUAL = 2  # the token in place of a rejected draft
    DRAFT = 3  # a draft; keyed by the round too, as one position may be drafted again


def uniform(seed: int, stream: Stream, place: int, draft: int = 0) -> float:
    """Return the number in [0, 1) of a place in an answer, and of a draft that begins there."""
    if stream is Stream.DRAFT:
        return of_drafts(seed, place, draft + 1)[draft]
    return at_place(seed, place)[stream]


def at_place(seed: int, place: int) -> tuple[float, float, float]:
    """Return the numbers of a place for ``TOKEN``, ``COIN`` and ``RESIDUAL``, in their order."""
    token, coin, residual, *_ = _words(seed, place, 0)
    return _number(token), _number(coin), _number(residual)


def of_drafts(seed: int, place: int, count: int) -> list[float]:
    """Return the numbers of the first ``count`` drafts of a round that begins at ``place``."""
    parts = (_words(seed, place, 1 + part) for part in range(-(-count // 8)))
    return [_number(word) for words in parts for word in words][:count]


def _words(seed: int, place: int, part: int) -> tuple[int, ...]:
    return _WORDS.unpack(blake2b(_KEY.pack(seed, place, part)).digest())


def _number(word: int) -> float:
    return (word >> 11) * 2.0**-53
