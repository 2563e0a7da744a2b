"""Constants of the n-gram hash: table primes, row offsets, multipliers. Report §2.4.2.

They follow from the configuration alone, so no checkpoint stores them.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import numpy as np

from openv41.config import EngramConfig

SEED_STEP = 10007  # the released code seeds a layer's generator with SEED_STEP * layer


@dataclass(frozen=True, kw_only=True, slots=True)
class HashConstants:
    """The hash of one Engram layer: ``row = mix % primes[order][head] + offsets[order][head]``."""

    layer: int
    primes: tuple[tuple[int, ...], ...]  # [G, Q]: rows of the table of each n-gram order and head
    offsets: tuple[tuple[int, ...], ...]  # [G, Q]: exclusive prefix sums, order-major
    multipliers: tuple[int, ...]  # one odd int64 per look-back shift 0..max_ngram-1

    @property
    def num_rows(self) -> int:
        """Rows of the layer's embedding table."""
        return self.offsets[-1][-1] + self.primes[-1][-1]


def hash_constants(engram: EngramConfig) -> tuple[HashConstants, ...]:
    """Constants of every Engram layer, in the order of ``engram.layer_ids``."""
    primes = hash_primes(
        len(engram.layer_ids), engram.num_orders, engram.num_heads, engram.table_size
    )
    return tuple(
        HashConstants(
            layer=layer,
            primes=table,
            offsets=_offsets(table),
            multipliers=_multipliers(layer, engram.max_ngram, engram.compressed_vocab_size),
        )
        for layer, table in zip(engram.layer_ids, primes, strict=True)
    )


@lru_cache(maxsize=64)
def hash_primes(
    num_layers: int, num_orders: int, num_heads: int, table_size: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Distinct primes above ``table_size - 1``, per layer, n-gram order and head.

    Every order searches upward from ``table_size - 1`` again, and no prime is used twice: in
    effect the primes ascend over layers, orders and heads.
    """
    current, layers = table_size - 1, []
    for _ in range(num_layers):
        orders = []
        for _ in range(num_orders):
            heads = []
            for _ in range(num_heads):
                current = _next_prime(current)
                heads.append(current)
            orders.append(tuple(heads))
        layers.append(tuple(orders))
    return tuple(layers)


def num_embeddings(
    num_layers: int, num_orders: int, num_heads: int, table_size: int
) -> tuple[int, ...]:
    """Rows of each layer's table: the sum of its primes."""
    tables = hash_primes(num_layers, num_orders, num_heads, table_size)
    return tuple(sum(map(sum, table)) for table in tables)


def table_rows(engram: EngramConfig) -> tuple[int, ...]:
    """Rows that the tables of these settings need: what ``engram.num_embeddings`` must be."""
    return num_embeddings(
        len(engram.layer_ids), engram.num_orders, engram.num_heads, engram.table_size
    )


def _next_prime(number: int) -> int:
    number += 1
    while number < 2 or any(number % d == 0 for d in range(2, isqrt(number) + 1)):
        number += 1
    return number


def _offsets(table: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    total, out = 0, []
    for order in table:
        row = []
        for prime in order:
            row.append(total)
            total += prime
        out.append(tuple(row))
    return tuple(out)


def _multipliers(layer: int, count: int, compressed_vocab_size: int) -> tuple[int, ...]:
    """Odd numbers small enough that no compressed id times one of them leaves int64."""
    bound = max(1, np.iinfo(np.int64).max // compressed_vocab_size // 2)
    draws = np.random.default_rng(SEED_STEP * layer).integers(0, bound, size=count, dtype=np.int64)
    return tuple(int(draw) * 2 + 1 for draw in draws)
