"""Best-fit packing: which documents stand together in a batch, decided by their lengths alone."""

import bisect
from collections.abc import Sequence

_MASK = (1 << 64) - 1


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Numbers of the lengths, in bins that hold at most ``capacity`` together.

    The longest come first, equal ones in their order; each goes into the bin that it leaves with
    the least room.
    """
    assert not lengths or max(lengths) <= capacity, f"{max(lengths)} is over {capacity}"
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, bin), sorted
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        place = bisect.bisect_left(rooms, (lengths[number], 0))
        if place < len(rooms):
            room, chosen = rooms.pop(place)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(number)
        if room > lengths[number]:
            bisect.insort(rooms, (room - lengths[number], chosen))
    return bins


def split_document(start: int, stop: int, longest: int, key: int) -> list[tuple[int, int]]:
    """Cut a document into pieces of at most ``longest`` tokens, of which neighbours share one.

    Every pair of neighbouring tokens is then in one piece. ``key`` decides where the first cut is.
    """
    if stop - start <= longest:
        return [(start, stop)]
    pieces = []
    end = start + 2 + key % (longest - 1)
    while start < stop - 1:
        pieces.append((start, min(end, stop)))
        start = min(end, stop) - 1
        end = start + longest
    return pieces


def mix(value: int) -> int:
    """Scramble 64 bits (the finaliser of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31


def shuffled(index: int, size: int, key: int) -> int:
    """Image of ``index`` under a pseudo-random permutation of range(size), in constant memory.

    A Feistel network permutes the next power of four; values outside are sent through again.
    """
    half = max(1, (size.bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(6):
            left, right = right, left ^ (mix(key ^ turn << 56 ^ right) & mask)
        index = left << half | right
        if index < size:
            return index
