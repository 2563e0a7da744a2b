"""Sample shards and the batches made of them."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from openv41.errors import ConfigError, DataError, InputError
from openv41.image_grid import grid_of
from openv41.io.checkpoint import load_model
from openv41.io.image_processor import load_image, process_image
from openv41.prompt import Message, ToolCall
from openv41.prompt.tokens import IMAGE
from openv41.train.distill import TeacherSpec
from openv41.train.evaluate import HeldOutImages
from openv41.train.loop import Trainer
from openv41.train.sample_batches import PairBatches, SampleBatches, pack_samples
from openv41.train.sample_shards import SampleShards, prepare_sample_shards
from openv41.train.samples import ImagePart, Sample, TextPart
from openv41.train.stages import Stage, place_of
from openv41.train.token_shards import prepare_shards
from tests.train.image_runs import VISION, answer, picture, samples, seeing_run, talk
from tests.train.runs import changed, read_log

pytestmark = pytest.mark.unchecked


@pytest.fixture(scope="module")
def tokenizer(image_tokenizer):
    return image_tokenizer


@pytest.fixture(scope="module")
def shards(image_shards):
    return image_shards


def learned(tokenizer, sample, weight=1.0):
    return tokenizer.decode(sample.tokens[sample.weights == weight].tolist())


def test_ids_targets_and_pixels(tokenizer, shards):
    assert len(shards) == 12
    image = tokenizer.special_id(IMAGE)
    eos = tokenizer.decode([1])
    pair, document, chat = (shards.read(i) for i in range(3))
    assert learned(tokenizer, pair) == f"thou art grey{eos}"
    assert learned(tokenizer, document) == f"lo  so{eos}"
    assert learned(tokenizer, chat) == f"A sea{eos}"
    for sample in (pair, document, chat):
        spans = sum(grid.span_length for grid in sample.grids)
        assert (sample.tokens == image).sum() == spans
        assert not sample.weights[sample.tokens == image].any()
    want = process_image(load_image(picture(0).data), VISION)
    assert np.array_equal(pair.pixels, want.pixels.numpy())
    assert document.grids == (grid_of(18, 6, VISION), grid_of(6, 6, VISION))
    counts = shards.index
    assert counts.text_tokens + counts.image_tokens == sum(shards.lengths)
    assert counts.targets == sum(int((shards.read(i).weights > 0).sum()) for i in range(12))


def test_every_learned_answer_is_what_the_model_writes(tokenizer, tmp_path):
    """Reasoning, calls and the end of each answer, with its weight; nothing of the prompts."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    calling = answer("wait", reasoning="hm", tool_calls=(ToolCall("add", '{"a": 1}'),))
    chat = talk(
        "chat",
        Message("user", "What?"),
        answer("no"),
        Message("user", "And?"),
        calling,
        Message("tool", "7"),
        answer("yes", reasoning="so"),
        weights=(0.0, 0.0, 0.0, 0.25, 0.0, 2.0),
        thinking=True,
        tools=tools,
    )
    plain = talk(
        "plain", Message("user", "What?"), answer("no"), Message("user", "And?"), answer("oh")
    )
    plain = replace(plain, weights=(0.0, 0.5, 0.0, 1.0))
    made = prepare_sample_shards([chat, plain], tokenizer, None, tmp_path / "o", max_tokens=4000)
    first, second = made.read(0), made.read(1)
    eos, end = tokenizer.decode([1]), "</think>"
    called = learned(tokenizer, first, 0.25)
    assert called.startswith(f"hm{end}wait")
    assert called.endswith(eos)
    assert '"add"' in called
    assert learned(tokenizer, first, 2.0) == f"so{end}yes{eos}"
    assert learned(tokenizer, second, 0.5) == f"no{eos}"
    assert learned(tokenizer, second) == f"oh{eos}"
    assert (first.pixels.size, first.grids, made.needs_vision) == (0, (), False)
    made.check(tokenizer, None)
    made.check(tokenizer, VISION)
    batch = SampleBatches(made, bin_tokens=4000, seed=0).batch(0)
    assert batch.pixels is None
    assert batch.weights.dtype == torch.float32
    assert batch.weights.sum() == sum(float(made.read(i).weights.sum()) for i in range(2))


def test_a_long_sample_is_left_out(tokenizer, tmp_path, caplog):
    long = Sample("long", parts=(picture(3), TextPart("word " * 200)))
    some = prepare_sample_shards(
        [long, *samples(1)], tokenizer, VISION, tmp_path / "out", max_tokens=40
    )
    assert len(some) == 1
    assert "long has" in caplog.text
    with pytest.raises(DataError, match="nothing to learn"):
        prepare_sample_shards([long], tokenizer, VISION, tmp_path / "none", max_tokens=40)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Sample("s:4", parts=(ImagePart(b"no", "s.png"),)), "s:4: s.png: cannot be read as an"),
        (talk("s:5", Message("user", "a")), "s:5: a conversation must end"),
        (talk("s:6", answer("a")), "s:6: messages[0] cannot be learned: nothing asks for it"),
        (
            talk(
                "s:7",
                Message("user", "a"),
                answer("b", reasoning="c"),
                Message("user", "d"),
                answer("e"),
                weights=(0.0, 1.0, 0.0, 1.0),
                thinking=True,
            ),
            "s:7: messages[1] cannot be learned within the whole conversation",
        ),
    ],
)
def test_a_bad_sample_is_named(tokenizer, tmp_path, sample, message):
    with pytest.raises(DataError, match=re.escape(message)):
        prepare_sample_shards([sample], tokenizer, VISION, tmp_path / "out", max_tokens=40)
    assert list(tmp_path.iterdir()) == []


def test_other_shards_are_not_replaced(text_files, tokenizer, tmp_path):
    prepare_shards(text_files, tokenizer, tmp_path / "text")
    with pytest.raises(DataError, match="text exists and holds no sample shards; name a new"):
        prepare_sample_shards(samples(3), tokenizer, VISION, tmp_path / "text", max_tokens=64)
    assert (tmp_path / "text" / "index.json").is_file()
    for count in (3, 6):
        made = prepare_sample_shards(
            samples(count), tokenizer, VISION, tmp_path / "out", max_tokens=64
        )
        assert len(made) == count


def test_images_need_a_model_that_sees(tokenizer, shards, tmp_path):
    with pytest.raises(DataError, match="0: picture 0: these samples are for a model without"):
        prepare_sample_shards(samples(1), tokenizer, None, tmp_path / "out", max_tokens=64)
    assert shards.needs_vision
    with pytest.raises(DataError, match="the model takes none; prepare the samples for this"):
        shards.check(tokenizer, None)


def test_damage_is_noticed(tokenizer, shards, tmp_path):
    folder = tmp_path / "copy"
    prepare_sample_shards(samples(2), tokenizer, VISION, folder, max_tokens=64)
    data = (folder / "pixels.bin").read_bytes()
    (folder / "pixels.bin").write_bytes(data[:-1] + b"\xaa")
    with pytest.raises(DataError, match="does not have the hash"):
        SampleShards(folder)
    (folder / "pixels.bin").write_bytes(data[:-1])
    with pytest.raises(DataError, match="truncated"):
        SampleShards(folder)
    (folder / "index.json").write_text("{}")
    with pytest.raises(DataError, match="not an index of sample shards"):
        SampleShards(folder)
    with pytest.raises(DataError, match="was prepared for images of"):
        shards.check(tokenizer, replace(VISION, min_pixels=100))


def test_every_epoch_holds_every_sample_once(shards):
    batches = SampleBatches(shards, bin_tokens=64, seed=1)
    steps = len(batches.bins)
    assert sorted(i for own in batches.bins for i in own) == list(range(12))
    first = [batches.batch(step).ids for step in range(steps)]
    assert sum(map(len, first)) == sum(shards.lengths)
    assert max(map(len, first)) <= 64
    second = [batches.batch(steps + step).ids for step in range(steps)]
    assert {tuple(ids.tolist()) for ids in first} == {tuple(ids.tolist()) for ids in second}
    assert [tuple(i.tolist()) for i in first] != [tuple(i.tolist()) for i in second]
    again = SampleBatches(shards, bin_tokens=64, seed=1).batch(3)
    assert torch.equal(again.ids, first[3])
    with pytest.raises(InputError, match="a step has room for 8"):
        SampleBatches(shards, bin_tokens=8, seed=1)


@pytest.fixture(scope="module")
def run(image_text, shards, tmp_path_factory):
    return seeing_run(image_text, shards, tmp_path_factory.mktemp("run") / "out")


@pytest.mark.shapes
def test_a_run_learns_from_both(run, tmp_path):
    trainer = Trainer(replace(run, out=tmp_path / "out"), resume=False)
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}
    trainer.fit()
    records = read_log(tmp_path / "out")
    assert all(record["image_tokens"] > 0 for record in records)
    assert all(record["balance"].keys() == {"text", "image"} for record in records)
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert {n for n in before if n.startswith("vision.")} <= moved
    assert {n for n in before if n.endswith("bias_vl")} <= moved
    loaded = load_model(tmp_path / "out" / "checkpoint")
    assert torch.equal(loaded.vision.newline, trainer.model.vision.newline)


def test_a_resumed_run_goes_on_alike(run, tmp_path):
    Trainer(replace(run, out=tmp_path / "whole"), resume=False).fit()
    part = Trainer(replace(run, out=tmp_path / "part"), resume=False)
    part.run.out.mkdir()
    for _ in range(3):
        part._advance()
    part.save()
    Trainer(replace(run, out=tmp_path / "part"), resume=True).fit()
    assert read_log(tmp_path / "part") == read_log(tmp_path / "whole")[3:]


def test_image_positions_are_learned_only_where_asked(run):
    trainer = Trainer(run, resume=False)
    packed = trainer.batches.batch(0).beside(trainer.images.batch(0))
    parts = list(packed.split(40))
    assert torch.equal(torch.cat([p.ids for p in parts]), packed.ids)
    assert torch.equal(torch.cat([p.pixels for p in parts if p.pixels is not None]), packed.pixels)
    assert [g for p in parts for g in p.images] == list(packed.images)
    image = run.model.image_token_id
    spans = packed.ids == image
    assert spans.any()
    assert not packed.target_weights(None)[spans].any()
    assert torch.equal(packed.target_weights(image), packed.weights + spans)
    assert trainer.batches.batch(0).target_weights(image) is None  # text: all of it
    assert packed.weights[: len(trainer.batches.batch(0).ids)].all()


def test_the_last_stage_learns_answers_instead_of_text(run, tokenizer, tmp_path):
    """And only it; a resumed run goes on alike."""
    chats = [
        talk(
            f"{i}", Message("user", "What? " * (i % 4)), answer(f"{i} seas"), weights=(0.0, 1.0 + i)
        )
        for i in range(9)
    ]
    sft = prepare_sample_shards(chats, tokenizer, None, tmp_path / "sft", max_tokens=64)
    train = replace(run.stages[0].train, tokens=192, bounded_replay="all_bounded")
    stages = tuple(Stage(name=name, train=train) for name in ("pretrain", "posttrain"))
    model = replace(run.model, vision=None, image_token_id=1_000_000)
    run = replace(run, model=model, images=None, sft=sft.folder, stages=stages)
    trainer = Trainer(replace(run, out=tmp_path / "whole"), resume=False)
    assert trainer._batch(place_of(stages, 1)).weights is None
    trainer.fit()
    got = trainer._batch(place_of(stages, 2))
    want = SampleBatches(sft, bin_tokens=96, seed=train.seed + 1).batch(0)
    assert torch.equal(got.ids, want.ids)
    assert torch.equal(got.weights, want.weights)
    part = Trainer(replace(run, out=tmp_path / "part"), resume=False)
    part.run.out.mkdir()
    for _ in range(3):
        part._advance()
    part.save()
    Trainer(replace(run, out=tmp_path / "part"), resume=True).fit()
    records = read_log(tmp_path / "whole")
    assert [record["stage"] for record in records] == ["pretrain"] * 2 + ["posttrain"] * 2
    assert read_log(tmp_path / "part") == records[3:]


def test_pairs_are_single_images_with_a_text_to_learn(tokenizer, shards, tmp_path):
    assert shards.pairs() == [0, 2, 3, 5, 6, 8, 9, 11]  # every third sample has two images
    mute = Sample("mute", parts=(picture(1), TextPart("a", 0.0)))
    few = prepare_sample_shards(
        [mute, *samples(2)], tokenizer, VISION, tmp_path / "few", max_tokens=64
    )
    with pytest.raises(DataError, match="holds 1 pairs of one image and a text"):
        few.pairs()


def test_batches_of_pairs_change_from_epoch_to_epoch(shards):
    """Three of eight pairs at a time: two batches in an epoch, in which no pair occurs twice."""
    longest = max(shards.lengths[i] for i in shards.pairs())
    batches = PairBatches(shards, batch_tokens=4 * longest - 1, seed=1)
    assert batches.size == 3
    own = {shards.read(i).pixels.tobytes(): i for i in shards.pairs()}
    epochs = []
    for epoch in range(4):
        packed = [batches.batch(2 * epoch + n) for n in range(2)]
        assert all(len(p.lengths) == 3 for p in packed)
        images = [i for p in packed for i in p.pixels.split([g.num_patches for g in p.images])]
        epochs.append([own[image.numpy().tobytes()] for image in images])
        assert len(set(epochs[-1])) == 6
    assert len({tuple(numbers) for numbers in epochs}) == 4
    assert {number for numbers in epochs for number in numbers} == set(shards.pairs())
    again = PairBatches(shards, batch_tokens=4 * longest - 1, seed=1).batch(3)
    assert torch.equal(again.pixels, batches.batch(3).pixels)
    assert PairBatches(shards, batch_tokens=1000, seed=1).size == 8
    with pytest.raises(InputError, match=f"a batch of {2 * longest - 1} must have room for two"):
        PairBatches(shards, batch_tokens=2 * longest - 1, seed=1)


def test_the_heldout_score_is_that_of_the_plain_model(run, shards):
    """Sample by sample, over the tokens that training would learn."""
    trainer = Trainer(run, resume=False)
    whole = HeldOutImages(shards, num_tokens=10**9, forward_tokens=50)
    assert whole.chosen == list(range(12))
    some = HeldOutImages(shards, num_tokens=sum(shards.lengths) // 3, forward_tokens=50)
    assert len(some.chosen) in (3, 4)
    for held in (whole, some):
        nats, count = 0.0, 0
        for number in held.chosen:
            part = pack_samples([shards.read(number)])
            with torch.no_grad():
                logits = trainer.model.logits(trainer.model(part.for_model(trainer.model)).hidden)
            scores = logits.double().log_softmax(-1)
            for place in (part.weights > 0).nonzero()[:, 0].tolist():
                nats -= scores[place - 1, part.ids[place]].item()
                count += 1
        assert held.score(trainer.model) == pytest.approx(nats / count, rel=1e-6)
    assert len(whole._parts()) > 2


def test_a_run_logs_its_heldout_images(run, shards, tmp_path):
    held = replace(run, out=tmp_path / "out", heldout_images=shards.folder)
    trainer = Trainer(held, resume=False)
    trainer.fit()
    scores = [record.get("heldout_image_nats") for record in read_log(tmp_path / "out")]
    assert [score is not None for score in scores] == [False, False, True] * 2
    assert scores[-1] == trainer.heldout_images.score(trainer.model) < scores[2]
    with pytest.raises(ConfigError, match=r"heldout images: the run has '\w{64}', now it is None"):
        Trainer(replace(held, heldout_images=None), resume=True)
    blind = replace(held, out=tmp_path / "blind", images=None)
    blind = replace(blind, model=replace(held.model, vision=None))
    with pytest.raises(ConfigError, match=r"the model has no vision encoder for .*--images too"):
        Trainer(blind, resume=False)


def test_a_teacher_sees_the_images_too(run, tmp_path):
    base = Trainer(replace(run, out=tmp_path / "base"), resume=False).fit()
    taught = replace(run, out=tmp_path / "out", base=base, teachers=(TeacherSpec(base),))
    Trainer(changed(taught, tokens=192, lm_weight=0.0), resume=False).fit()
    losses = [record["distill_loss"] for record in read_log(tmp_path / "out")]
    assert abs(losses[0]) < 1e-7 < losses[1]


def test_images_without_an_image(run, tokenizer, tmp_path):
    words = (Sample(f"{i}", parts=(TextPart("thou art grey"),)) for i in range(4))
    bare = prepare_sample_shards(words, tokenizer, VISION, tmp_path / "bare", max_tokens=64)
    with pytest.raises(InputError, match=r"bare holds no image; train on text alone .*--sft"):
        Trainer(replace(run, images=bare.folder, out=tmp_path / "out"), resume=False)
