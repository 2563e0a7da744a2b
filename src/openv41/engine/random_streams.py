"""Random numbers of a request by what they are for and where: streams that share nothing.

A number is a function of its key, so that it does not matter who else runs, how often a position is
computed, or in which order numbers are asked for.
"""

from enum import IntEnum
from hashlib import blake2b
from struct import Struct

_KEY = Struct("<4Q")


class Stream(IntEnum):
    """What a random number decides."""

    TOKEN = 0  # the next token, drawn from what the model says
    DRAFT = 1  # a draft; keyed by the round too, as one position may be drafted again
    COIN = 2  # whether a draft is accepted
    RESIDUAL = 3  # the token in place of a rejected draft


def uniform(seed: int, stream: Stream, place: int, draft: int = 0) -> float:
    """Return the number in [0, 1) of a place in an answer, and of a draft that begins there."""
    key = _KEY.pack(seed, stream, place, draft)
    bits = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53
