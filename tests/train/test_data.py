"""Training batches repeat exactly and cover the text; held-out windows score every byte once."""

import math
from collections import Counter
from itertools import pairwise

import pytest

from openv41.errors import InputError
from openv41.train import packing
from openv41.train.data import TrainingBatches, bits_per_byte, evaluation_windows
from openv41.train.packing import best_fit, split_document
from openv41.train.token_shards import prepare_shards


@pytest.fixture(scope="module")
def shards(text_files, text_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "shards"
    return prepare_shards(text_files, text_tokenizer, folder, shard_tokens=64)


def batches(shards, *, seed=3, sequence_length=16, batch_tokens=48):
    return TrainingBatches(
        shards, sequence_length=sequence_length, batch_tokens=batch_tokens, seed=seed
    )


def test_batch_is_a_function_of_seed_and_step(shards):
    run = batches(shards)
    first = [run.batch(step).documents() for step in range(30)]
    resumed = batches(shards)
    assert [resumed.batch(step).documents() for step in reversed(range(30))] == first[::-1]
    assert len({str(batch) for batch in first}) == 30
    assert batches(shards, seed=4).batch(0).documents() != first[0]


def test_batch_is_pieces_of_documents(shards, text_tokenizer, text_files):
    """Every piece is text of one file; BOS only starts and EOS only ends a piece."""
    texts = [b"\0" + file.read_bytes() + b"\1" for file in text_files]
    run = batches(shards)
    for step in range(40):
        batch = run.batch(step)
        documents = batch.documents()
        assert tuple(map(len, documents)) == batch.lengths
        assert max(batch.lengths) <= 16
        assert sum(batch.lengths) <= 48
        for ids in documents:
            assert 0 not in ids[1:]
            assert 1 not in ids[:-1]
            marked = b"".join(
                bytes([token]) if token < 2 else text_tokenizer.token_bytes(token) for token in ids
            )
            assert any(marked in text for text in texts)


@pytest.mark.parametrize("sequence_length", [2, 7, 16, 50])
def test_the_text_is_trained_on_once_per_epoch_in_another_order(shards, sequence_length):
    """Places instead of ids: each pair of neighbours in a document, over six epochs."""
    run = batches(shards, sequence_length=sequence_length, batch_tokens=2 * sequence_length)
    inside = {place for place in range(shards.num_tokens) if place + 1 not in shards.bounds}
    pairs, orders, step = Counter(), [], 0
    for _ in range(6):
        epoch = run._find(step)
        places = [p for bin_ in epoch.bins for p in bin_]
        for start, stop in places:
            pairs.update(range(start, stop - 1))
        orders.append(places)
        step = epoch.end
    for start, stop in epoch.left:
        pairs.update(range(start, stop - 1))
    assert set(pairs) == inside
    assert set(pairs.values()) == {6}
    assert len({str(order) for order in orders}) == 6


def test_all_bins_but_the_last_are_full(text_tokenizer, tmp_path):
    """Documents of many lengths leave at most 1e-4 of the batches empty, over five epochs."""
    for number in range(300):
        (tmp_path / f"{number}.txt").write_text("to be or not " * (1 + number * 7919 % 23))
    files = sorted(tmp_path.glob("*.txt"))
    shards = prepare_shards(files, text_tokenizer, tmp_path / "shards")
    run = batches(shards, sequence_length=64, batch_tokens=512)
    step = 0
    for _ in range(5):
        step = run._find(step).end
        assert run.padding <= 1e-4


def test_best_fit_by_hand():
    assert best_fit([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert best_fit([2, 7, 3, 7], 10) == [[1, 2], [3, 0]]  # where least room is left
    assert best_fit([], 10) == []
    with pytest.raises(AssertionError, match="11 is over 10"):
        best_fit([11], 10)


@pytest.mark.parametrize(("length", "longest"), [(2, 2), (9, 9), (10, 9), (100, 9), (100, 2)])
def test_pieces_share_one_token_with_their_neighbours(length, longest):
    seen = set()
    for key in range(2 * longest):
        pieces = split_document(50, 50 + length, longest, key)
        assert (pieces[0][0], pieces[-1][1]) == (50, 50 + length)
        assert all(2 <= stop - start <= longest for start, stop in pieces)
        assert all(one[1] - 1 == two[0] for one, two in pairwise(pieces))
        seen.add(str(pieces))
    assert len(seen) == (1 if length <= longest else longest - 1)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 300])
def test_shuffle_is_a_permutation(size):
    for key in (0, 1, (1 << 64) - 1):
        assert sorted(packing.shuffled(i, size, key) for i in range(size)) == list(range(size))


def test_shuffle_has_no_visible_order():
    """Neighbours end up apart, and two keys give unrelated orders."""
    size = 512
    first, second = ([packing.shuffled(i, size, key) for i in range(size)] for key in (5, 6))
    rises = sum(a < b for a, b in pairwise(first))
    assert abs(rises - size / 2) < 6 * math.sqrt(size / 12)
    mean = (size - 1) / 2
    covariance = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True)) / size
    assert abs(covariance) < 6 * (size**2 / 12) / math.sqrt(size)
    assert packing.shuffled(10**17, 10**18, 5) < 10**18


@pytest.mark.parametrize(
    ("sequence_length", "stride"), [(2, 1), (5, 1), (5, 4), (16, 8), (31, 7), (1000, 500)]
)
def test_every_held_out_byte_is_scored_once(
    shards, text_files, text_tokenizer, sequence_length, stride
):
    scored = [[] for _ in text_files]
    for window in evaluation_windows(shards, sequence_length=sequence_length, stride=stride):
        ids = window.ids.tolist()
        assert 1 <= window.first_scored < len(ids) <= sequence_length
        scored[window.document] += ids[window.first_scored :]
        text = [0, *text_tokenizer.encode(text_files[window.document].read_bytes().decode())]
        end = 1 + len(scored[window.document])
        assert ids == text[end - len(ids) : end]  # the context is what stands before
        assert len(ids) == min(end, sequence_length)  # and as much of it as fits
        assert len(ids) - window.first_scored <= stride or end <= sequence_length
    found = [text_tokenizer.decode_bytes(ids) for ids in scored]
    assert found == [file.read_bytes() for file in text_files]


def test_bits_per_byte_of_a_uniform_guess():
    assert bits_per_byte(1000 * math.log(256), 1000) == pytest.approx(8.0, rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"sequence_length": 1}, "sequence_length is 1, must be at least 2"),
        ({"batch_tokens": 40}, r"batch_tokens is 40, must be a multiple of .* \(16\)"),
        ({"batch_tokens": 0}, "batch_tokens is 0, must be a multiple"),
        ({"sequence_length": 9999, "batch_tokens": 9999}, "fewer than one batch of 9999"),
    ],
)
def test_settings_that_cannot_work(shards, settings, problem):
    with pytest.raises(InputError, match=problem):
        batches(shards, **settings)


def test_steps_and_strides_that_cannot_work(shards):
    with pytest.raises(InputError, match="step is -1, must be at least 0"):
        batches(shards).batch(-1)
    for stride in (0, 8):
        with pytest.raises(InputError, match=rf"stride is {stride}, .* sequence_length \(8\)"):
            next(evaluation_windows(shards, sequence_length=8, stride=stride))
