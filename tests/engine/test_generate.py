"""Generation against whole forwards, its limits, and text that comes in pieces."""

from dataclasses import replace

import pytest
import torch

from openv41.engine.generate import as_text, generate
from openv41.engine.sampler import SamplingConfig
from openv41.errors import InputError
from openv41.io.tokenizer import train_tokenizer
from openv41.layers.batch import Batch
from tests.layers.mini import mini_model, random_ids

GREEDY = SamplingConfig(temperature=0.0)


@pytest.fixture(scope="module")
def model():
    return mini_model(3, torch.float64)


def shortened(model, **changes):
    """The same model under another configuration."""
    other = mini_model(3, torch.float64)
    other.config = replace(model.config, **changes)
    return other


@torch.inference_mode()
def by_whole_forwards(model, prompt, count):
    ids = list(prompt)
    for _ in range(count):
        hidden = model(Batch.from_documents([ids])).hidden
        ids.append(int(model.logits(hidden[-1:])[0].argmax()))
    return ids[len(prompt) :]


def test_greedy_decoding_equals_whole_forwards(model):
    prompt = random_ids(7)
    want = by_whole_forwards(model, prompt, 6)
    unreached = next(i for i in range(model.config.vocab_size) if i not in want)
    endless = shortened(model, eos_token_id=unreached)
    assert list(generate(endless, prompt, GREEDY, max_tokens=6)) == want
    first = next(i for i in range(1, 6) if want[i] not in want[:i])
    ending = shortened(model, eos_token_id=want[first])
    assert list(generate(ending, prompt, GREEDY, max_tokens=6)) == want[:first]


def test_equal_seeds_give_equal_tokens(model):
    def drawn(seed):
        return list(generate(model, [0], SamplingConfig(seed=seed, temperature=5.0), max_tokens=4))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_ids_without_text_are_never_drawn(model):
    hot = SamplingConfig(temperature=100.0)
    endless = shortened(model, eos_token_id=63)
    drawn = list(generate(endless, [0, 3], hot, max_tokens=12, num_tokens=4))
    assert len(drawn) == 12
    assert max(drawn) < 4


def test_it_stops_at_the_last_position(model):
    short = shortened(model, max_position=6, eos_token_id=63)
    assert len(list(generate(short, [0, 4, 5, 6], GREEDY, max_tokens=50))) == 3
    assert len(list(generate(short, [0, 4, 5, 6, 7, 8], GREEDY, max_tokens=50))) == 1
    with pytest.raises(InputError, match="prompt has 7 tokens; the model allows 6"):
        generate(short, [0] * 7, GREEDY, max_tokens=1)


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [([], 1, "the prompt holds no token"), ([0], 0, "max_tokens is 0, must be at least 1")],
)
def test_arguments_are_checked_at_the_call(model, prompt, count, message):
    with pytest.raises(InputError, match=message):
        generate(model, prompt, GREEDY, max_tokens=count)


def test_half_a_character_waits_for_the_rest(tmp_path):
    (tmp_path / "text").write_text("abc")
    tokenizer = train_tokenizer([tmp_path / "text"], vocab_size=259)
    text = "a\u00e9\U0001f642b"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())  # one token per byte
    assert list(as_text(ids, tokenizer)) == list(text)
    assert list(as_text(ids[:4], tokenizer)) == ["a", "\u00e9", "\ufffd"]
    assert list(as_text([ids[1], ids[0]], tokenizer)) == ["\ufffda"]
    assert list(as_text([], tokenizer)) == []
