"""Scores and continuations of texts against the plain model's logits."""

import pytest
import torch

from openv41.engine import scoring
from openv41.engine.scoring import Scorer, rolling_windows
from openv41.errors import InputError
from openv41.layers.batch import Batch
from tests.engine.mini_engine import Letters, arm, engine_of

BOS = 0
PAIR = 40  # stands for "12"


class Spelled(Letters):
    """Characters from "0" on, and one token of two characters."""

    def token_bytes(self, token):
        return b"12" if token == PAIR else super().token_bytes(token)

    def encode(self, text):
        return self.encode_batch([text])[0]

    def encode_batch(self, texts):
        spelled = chr(0x30 + PAIR)
        return [[ord(c) - 0x30 for c in text.replace("12", spelled)] for text in texts]


@pytest.fixture(scope="module")
def model():
    return arm(torch.float64, bitwise=False)


def scorer_of(model, num_pages=200):
    return Scorer(engine_of(model, tokenizer=Spelled(), cache={"num_pages": num_pages}))


@torch.no_grad()
def plain_scores(model, ids):
    """Log-probabilities after each of the tokens, in one forward."""
    return model.logits(model(Batch.from_documents([ids])).hidden).log_softmax(-1)


def plain_score(model, ids, start):
    scores = plain_scores(model, ids)
    return sum(scores[i - 1, ids[i]].item() for i in range(start, len(ids)))


def greedy_text(model, context, count):
    ids = [BOS, *Spelled().encode(context)]
    for _ in range(count):
        ids.append(int(plain_scores(model, ids)[-1].argmax()))
    return b"".join(map(Spelled().token_bytes, ids[-count:])).decode()


def test_loglikelihoods_equal_the_plain_model(model):
    pairs = [("34512", "67"), ("", "3"), ("7" * 30, "8912"), ("3", "45" * 20)]
    encode, want = Spelled().encode, []
    for context, continuation in pairs:
        ids = [BOS, *encode(context), *encode(continuation)]
        want.append(plain_score(model, ids, len(ids) - len(encode(continuation))))
    found = scorer_of(model).loglikelihoods(pairs)
    assert [value for value, _ in found] == pytest.approx(want, abs=1e-5)


def test_greedy_is_what_greedy_decoding_gives(model):
    text = greedy_text(model, "345", 4)
    assert "12" not in text
    wrong = "3" if text[0] != "3" else "4"
    other = wrong + greedy_text(model, f"345{wrong}", 3)  # all but the first token
    assert "12" not in other
    found = scorer_of(model).loglikelihoods([("345", text), ("345", other)])
    assert [greedy for _, greedy in found] == [True, False]


def test_where_context_and_continuation_are_cut(model):
    """A token that would span the cut is two; spaces before the cut belong to what follows."""
    scorer = scorer_of(model)
    assert scorer._encode_pair("31", "24") == ([3, 1], [2, 4])
    assert scorer._encode_pair("3", "124") == ([3], [PAIR, 4])
    space = ord(" ") - 0x30
    assert scorer._encode_pair("3  ", "4") == ([3], [space, space, 4])
    assert scorer._encode_pair(" ", "4") == ([], [space, 4])


def test_a_long_context_loses_its_beginning(model):
    scorer = scorer_of(model, num_pages=5)
    assert scorer.window == 20
    ids = Spelled().encode("3456789" * 5 + "45")
    want = plain_score(model, [BOS, *ids[-19:]], 18)
    [(value, _)] = scorer.loglikelihoods([("3456789" * 5, "45")])
    assert value == pytest.approx(want, abs=1e-5)
    for continuation in ("", "3" * 20):
        with pytest.raises(InputError, match=r"has (0|20) tokens, must be from 1 to 19"):
            scorer.loglikelihoods([("3", continuation)])


def test_rolling_scores_every_token_once(model):
    texts = ["3456789" * 8, "3", "", "45" * 10]
    want = []
    for text in texts:
        ids = [BOS, *Spelled().encode(text)]
        total = 0.0
        for first, scored, stop in rolling_windows(len(ids), 20):
            total += plain_score(model, ids[first:stop], scored - first)
        want.append(total)
    assert scorer_of(model, num_pages=5).rolling(texts) == pytest.approx(want, abs=1e-5)
    whole = [plain_score(model, [BOS, *Spelled().encode(text)], 1) for text in texts]
    assert scorer_of(model).rolling(texts) == pytest.approx(whole, abs=1e-5)
    assert want[0] != pytest.approx(whole[0], abs=1e-3)


@pytest.mark.parametrize("size", [2, 3, 5, 20])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 6, 9, 40])
def test_windows_cover_a_text(length, size):
    windows = list(rolling_windows(length, size))
    scored = [place for _, first, stop in windows for place in range(first, stop)]
    assert scored == list(range(1, length))
    assert all(first < start < stop <= first + size for first, start, stop in windows)
    assert all(stop - first == min(size, length) for first, _, stop in windows)
    assert all(start - first == 1 for first, start, _ in windows[:-1])


def test_generation_is_greedy_and_stops(model):
    text = greedy_text(model, "345", 6)
    scorer = scorer_of(model)
    asked = [
        ("345", {"until": [], "max_gen_toks": 6}),
        ("345", {"until": text[3], "max_gen_toks": 6, "do_sample": False, "temperature": 1.0}),
        ("345", {"until": ["", text[2:4]], "max_new_tokens": 6, "temperature": 0}),
    ]
    assert scorer.generations(asked) == [
        text,
        text.partition(text[3])[0],
        text.partition(text[2:4])[0],
    ]
    short = scorer_of(model, num_pages=5)
    want = greedy_text(model, ("3456789" * 5)[-13:], 6)
    assert short.generations([("3456789" * 5, {"max_gen_toks": 6})]) == [want]


def test_samples_of_equal_requests_differ_and_repeat(model):
    asked = [("345", {"do_sample": True, "temperature": 2.0, "top_k": 50, "max_gen_toks": 8})] * 3
    found = scorer_of(model).generations(asked)
    assert len(set(found)) == 3
    assert scorer_of(model).generations(asked) == found
    cold = [("345", {"temperature": 0.5, "max_gen_toks": 8})]
    assert scorer_of(model).generations(cold) != scorer_of(model).generations(
        [("345", {"max_gen_toks": 8})]
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beams": 3, "until": "a"}, "generation settings beams are unknown; there are until, "),
        ({"max_gen_toks": 800}, "max_gen_toks is 800, must be below 512"),
        ({"max_gen_toks": 3, "temperature": -1.0, "do_sample": True}, "temperature is -1.0"),
    ],
)
def test_settings_that_do_not_work(model, settings, message):
    with pytest.raises(ValueError, match=message):
        scorer_of(model).generations([("345", settings)])


def test_progress_is_told_and_order_kept(model, monkeypatch):
    monkeypatch.setattr(scoring, "AT_ONCE", 2)
    done = []
    scorer = Scorer(engine_of(model, tokenizer=Spelled()), done.append)
    pairs = [("3", str(n)) for n in range(3, 8)]
    found = scorer.loglikelihoods(pairs)
    assert done == [2, 2, 1]
    alone = [scorer_of(model).loglikelihoods([pair])[0] for pair in pairs]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in alone], abs=1e-9)
