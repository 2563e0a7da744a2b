"""Baselines: proper probabilities, hand-computed counts, no look at held-out text."""

import lzma
import math

import numpy as np
import pytest

from demo.baselines import (
    WittenBellTrigram,
    shrink_tokenizer,
    trigram_bits_per_byte,
    xz_bits_per_byte,
)
from openv41.io.tokenizer import train_tokenizer

SENTENCE = "Now is the winter of our discontent made glorious summer by this sun of York.\n"


def array(*values):
    return np.array(values, dtype=np.int64)


def test_probabilities_sum_to_one_after_every_kind_of_context():
    rng = np.random.default_rng(3)
    vocabulary = 17
    texts = [rng.integers(0, 12, size=n) for n in (200, 1, 63)]
    model = WittenBellTrigram(texts, vocabulary)
    every = np.arange(vocabulary)
    for u in range(vocabulary + 1):
        for v in range(vocabulary + 1):
            p = model.probabilities(np.full(17, u), np.full(17, v), every)
            assert p.min() > 0
            assert p.sum() == pytest.approx(1, abs=1e-12)


def test_probability_by_hand():
    model = WittenBellTrigram([[0, 1, 0, 1, 2]], 4)  # start tokens have id 4
    # unigram: 5 tokens, 3 types; P(1) = (2 + 3/4) / 8
    unigram = (2 + 3 * 0.25) / 8
    # after 0: 1 twice, 1 type; after (1, 0): 1 once, 1 type
    bigram = (2 + 1 * unigram) / (2 + 1)
    trigram = (1 + 1 * bigram) / (1 + 1)
    assert model.probabilities(array(1), array(0), array(1))[0] == pytest.approx(trigram, abs=1e-15)
    # the context (2, 0) never occurs: the bigram stands
    assert model.probabilities(array(2), array(0), array(1))[0] == pytest.approx(bigram, abs=1e-15)
    # after 2 nothing was seen: the unigram stands
    assert model.probabilities(array(1), array(2), array(1))[0] == pytest.approx(unigram, abs=1e-15)


def test_texts_do_not_run_into_each_other():
    model = WittenBellTrigram([[0, 1], [2, 3]], 4)
    apart = model.probabilities(array(0, 0), array(1, 1), array(2, 3))
    assert apart[0] == apart[1]  # as frequent as each other, 2 does not follow 1


def test_bits_add_up_the_first_token_too():
    model = WittenBellTrigram([[0, 1, 0, 1, 2]], 4)
    p = model.probabilities(array(4, 4, 1), array(4, 1, 3), array(1, 3, 0))
    assert model.bits([1, 3, 0]) == pytest.approx(-np.log2(p).sum(), abs=1e-12)


def test_smaller_vocabulary_equals_a_training_of_its_own(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(SENTENCE[i % 7 :] for i in range(40)))
    large = train_tokenizer([file], vocab_size=300)
    own = train_tokenizer([file], vocab_size=270)
    small = shrink_tokenizer(large, 270)
    assert small.vocab_size == 270
    assert small.encode(SENTENCE) == own.encode(SENTENCE)
    assert len(large.encode(SENTENCE)) < len(own.encode(SENTENCE))


def test_unknown_bytes_are_scored(tmp_path):
    train, heldout = tmp_path / "train.txt", tmp_path / "heldout.txt"
    train.write_text(SENTENCE * 20)
    heldout.write_text("\u00e9t\u00e9\n")  # 6 bytes, none of the accented ones in the training text
    scores = trigram_bits_per_byte([train], [heldout], (259,))
    assert 6 < scores[259] < 16
    heldout.write_text(SENTENCE)
    assert trigram_bits_per_byte([train], [heldout], (259,))[259] < 0.5


def test_xz_is_that_of_preset_9():
    raw = SENTENCE.encode() * 3
    want = 8 * len(lzma.compress(raw, preset=9)) / len(raw)
    assert math.isclose(xz_bits_per_byte([SENTENCE, SENTENCE * 2]), want)
