"""What the model is measured against: xz and an interpolated trigram, in bits per byte."""

import json
import lzma
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from openv41.io.tokenizer import MIN_VOCAB_SIZE, TextTokenizer, train_tokenizer

Ids = NDArray[np.int64]
VOCABULARIES = (1024, 2048)


def xz_bits_per_byte(texts: Sequence[str]) -> float:
    """Compress the joined texts as ``xz -9`` does."""
    raw = "".join(texts).encode()
    return 8 * len(lzma.compress(raw, preset=9)) / len(raw)


def shrink_tokenizer(tokenizer: TextTokenizer, vocabulary: int) -> TextTokenizer:
    """Keep the first merges only: what training for that many tokens gives, as BPE is greedy."""
    content = json.loads(tokenizer.data)
    model = content["model"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < vocabulary}
    model["merges"] = model["merges"][: vocabulary - MIN_VOCAB_SIZE]
    return TextTokenizer(json.dumps(content).encode(), f"the first {vocabulary} tokens")


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts of (context, token) pairs of one order; keys are context * (V + 1) + token."""

    keys: Ids  # sorted, distinct
    counts: Ids
    contexts: Ids  # sorted, distinct
    totals: Ids  # tokens seen after each context
    types: Ids  # distinct tokens seen after each context

    @classmethod
    def build(cls, keys: Ids, base: int) -> "_Counts":
        distinct, counts = np.unique(keys, return_counts=True)
        contexts, first, types = np.unique(distinct // base, return_index=True, return_counts=True)
        return cls(distinct, counts, contexts, np.add.reduceat(counts, first), types)


def _look_up(table: Ids, values: Ids, keys: Ids) -> Ids:
    """Read ``values`` at ``keys``; zero where the table lacks the key."""
    at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return np.where(table[at] == keys, values[at], 0)


class WittenBellTrigram:
    """Interpolated Witten-Bell model of order 3.

    P(w | h) = (c(h w) + T(h) P(w | h')) / (c(h) + T(h)), where T(h) counts the distinct tokens
    seen after h and h' drops the oldest token; below the unigram stands the uniform distribution.
    Each text opens with two start tokens (id V), which are never predicted.
    """

    def __init__(self, texts: Sequence[Sequence[int]], vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.base = vocabulary + 1
        history = [self._history(np.asarray(text, dtype=np.int64)) for text in texts]
        u, v, w = (np.concatenate(column) for column in zip(*history, strict=True))
        keys = (w, v * self.base + w, (u * self.base + v) * self.base + w)
        self.orders = [_Counts.build(key, self.base) for key in keys]

    def _history(self, ids: Ids) -> tuple[Ids, Ids, Ids]:
        padded = np.concatenate([np.full(2, self.vocabulary), ids])
        return padded[:-2], padded[1:-1], padded[2:]

    def probabilities(self, u: Ids, v: Ids, w: Ids) -> NDArray[np.float64]:
        """Return P(w | u v) for arrays of equal length."""
        p = np.full(len(w), 1 / self.vocabulary)
        contexts = (np.zeros_like(w), v, u * self.base + v)
        for order, context in zip(self.orders, contexts, strict=True):
            count = _look_up(order.keys, order.counts, context * self.base + w)
            total = _look_up(order.contexts, order.totals, context)
            types = _look_up(order.contexts, order.types, context)
            seen = total > 0
            p = np.where(seen, (count + types * p) / np.where(seen, total + types, 1), p)
        return p

    def bits(self, ids: Sequence[int]) -> float:
        """Return the code length of one text in bits."""
        p = self.probabilities(*self._history(np.asarray(ids, dtype=np.int64)))
        return float(-np.log2(p).sum())


def trigram_bits_per_byte(
    train: Sequence[Path], heldout: Sequence[Path], vocabularies: Sequence[int] = VOCABULARIES
) -> dict[int, float]:
    """Score every byte of ``heldout`` for each vocabulary; merges and counts see ``train`` only."""
    known, unseen = ([path.read_text() for path in part] for part in (train, heldout))
    num_bytes = sum(len(text.encode()) for text in unseen)
    largest = train_tokenizer(train, vocab_size=max(vocabularies))
    scores = {}
    for vocabulary in vocabularies:
        tokenizer = shrink_tokenizer(largest, vocabulary)
        model = WittenBellTrigram(tokenizer.encode_batch(known), vocabulary)
        scored = tokenizer.encode_batch(unseen)
        for text, ids in zip(unseen, scored, strict=True):
            assert tokenizer.decode_bytes(ids) == text.encode(), "the tokenizer lost bytes"
        scores[vocabulary] = math.fsum(model.bits(ids) for ids in scored) / num_bytes
    return scores
