"""Stages that make a vision encoder: what goes on to the next stage, and exact resume."""

from dataclasses import replace

import pytest
import torch

from openv41.config import ModelConfig
from openv41.errors import ConfigError
from openv41.io.checkpoint import load_model
from openv41.layers.batch import Batch
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.init import init_weights
from openv41.ngram_hash_constants import table_rows
from openv41.presets import PRESETS
from openv41.train.contrastive import ContrastiveModel
from openv41.train.loop import Trainer
from openv41.train.recipes import configure
from openv41.train.stages import (
    Stage,
    check_names,
    num_image_tokens,
    place_of,
    small_language_model,
)
from tests.layers.mini import mini_config, random_ids, token_map
from tests.train.image_runs import seeing_run
from tests.train.runs import read_log

pytestmark = [pytest.mark.unchecked, pytest.mark.xdist_group("vision stages")]  # built once

NAMES = ("vision", "vision-lm", "pretrain")


@pytest.fixture(scope="module")
def run(image_text, image_shards, tmp_path_factory):
    """Two steps of each stage."""
    base = seeing_run(
        image_text, image_shards, tmp_path_factory.mktemp("run") / "out", heldout_steps=1
    )
    train = replace(base.stages[0].train, tokens=192, warmup_tokens=0, checkpoint_steps=100)
    stages = tuple(Stage(name=name, train=train) for name in NAMES)
    return replace(base, stages=stages, heldout=image_text.folder)


@pytest.fixture(scope="module")
def finished(run):
    """The whole run, with the parameters behind every step."""
    trainer, behind = Trainer(run, resume=False), []

    def keep(_):
        behind.append({n: p.detach().clone() for n, p in trainer.model.named_parameters()})

    trainer.fit(keep)
    return trainer, behind


def encoder(parameters):
    return {n: p for n, p in parameters.items() if n.startswith("vision.encoder.")}


def test_the_log_tells_the_stages_apart(finished):
    trainer, _ = finished
    records = read_log(trainer.run.out)
    assert [r["stage"] for r in records] == [name for name in NAMES for _ in range(2)]
    assert ["retrieval" in r for r in records] == [True] * 2 + [False] * 4
    assert [r["balance"] == {} for r in records] == [True] * 2 + [False] * 4
    # Held-out text is scored by the model of the run alone.
    assert ["heldout_bits_per_byte" in r for r in records] == [False] * 4 + [True] * 2
    assert num_image_tokens(trainer.run.stages[:1]) == 192


@pytest.mark.shapes
def test_the_encoder_alone_goes_on(run, finished, tmp_path):
    """Each stage begins with the encoder of the one before it, and otherwise anew."""
    _, behind = finished
    trainer = Trainer(replace(run, out=tmp_path / "out"), resume=False)
    seen = []
    for step in range(6):
        if step in (2, 4):
            trainer._change(place_of(run.stages, step))
            now = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
            last = behind[step - 1]
            assert encoder(now).keys() == encoder(last).keys()
            assert all(torch.equal(p, last[n]) for n, p in encoder(now).items())
            fresh = CausalEncoderDecoder(trainer.model.config)
            init_weights(fresh, run.stages[0].train.seed)
            for name, parameter in fresh.named_parameters():
                is_new = torch.equal(parameter, now[name])
                assert is_new or name.startswith("vision.encoder."), name
            assert not torch.equal(
                fresh.vision.encoder.patch_embed.weight, now["vision.encoder.patch_embed.weight"]
            )
            assert not any(trainer.optimizer.state(p) for p in trainer.optimizer.parameters())
            seen.append((type(trainer.model), len(trainer.model.layers)))
        trainer._advance()
    assert seen == [(CausalEncoderDecoder, 2), (CausalEncoderDecoder, 4)]


def test_every_part_of_the_contrastive_model_moves(run, tmp_path):
    trainer = Trainer(replace(run, out=tmp_path / "out"), resume=False)
    assert isinstance(trainer.model, ContrastiveModel)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer._advance()
    still = {n for n, p in trainer.model.named_parameters() if torch.equal(p, before[n])}
    assert not still


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_run_resumes_within_and_between_the_stages(run, finished, tmp_path, stop):
    whole, behind = finished
    part = Trainer(replace(run, out=tmp_path / "part"), resume=False)
    part.run.out.mkdir()
    for _ in range(stop):
        part._advance()
    part.save()
    resumed = Trainer(part.run, resume=True)
    assert resumed.stage.name == NAMES[(stop - 1) // 2]  # the stage that wrote the state
    resumed.fit()
    assert read_log(tmp_path / "part") == read_log(whole.run.out)[stop:]
    after = dict(resumed.model.named_parameters())
    assert all(torch.equal(p, after[n]) for n, p in behind[-1].items())


def test_the_written_model_is_that_of_the_run(finished):
    trainer, behind = finished
    model = load_model(trainer.run.out / "checkpoint")
    assert model.config == trainer.run.model
    assert torch.equal(model.vision.newline, behind[-1]["vision.newline"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["pretrain", "vision"], "pretrain, vision: vision must come first"),
        (["vision-lm", "vision", "pretrain"], "vision and vision-lm must come first, in this"),
        (["vision"], "the run ends with vision, which makes an encoder .*; add pretrain"),
        (["vision", "vision-lm"], "the run ends with vision-lm"),
    ],
)
def test_orders_that_do_not_work(names, message):
    with pytest.raises(ConfigError, match=message):
        check_names(names)


def test_what_the_stage_needs(image_text):
    with pytest.raises(ConfigError, match="stage vision learns from images; give image-text shard"):
        configure("tiny", image_text.folder, [], stages=["vision", "pretrain"])
    settings = ["vision.micro_batch_tokens=512"]
    with pytest.raises(ConfigError, match=r"vision\.micro_batch_tokens is 512, must be 0"):
        configure("tiny", image_text.folder, settings, stages=["vision", "pretrain"], images=True)
    with pytest.raises(ConfigError, match=r"vision\.draft\.weight is 1\.0, must be 0"):
        configure(
            "tiny",
            image_text.folder,
            ["vision.draft.weight=1"],
            stages=["vision", "pretrain"],
            images=True,
        )
    settings = ["micro_batch_tokens=512", "vision-lm.tokens=100_000"]
    names = ["vision", "vision-lm", "pretrain"]
    _, stages, _ = configure("tiny", image_text.folder, settings, stages=names, images=True)
    assert [stage.train.micro_batch_tokens for stage in stages] == [0, 512, 512]
    assert [stage.train.tokens for stage in stages] == [500_000, 100_000, 2_000_000]
    assert [stage.train.optimizer.vision_lr_factor for stage in stages] == [1, 1, 0.1]


@pytest.mark.parametrize("name", [*PRESETS, "mini"])
def test_the_small_language_model_is_the_lower_half(name):
    whole = mini_config() if name == "mini" else PRESETS[name]()
    half = small_language_model(whole)
    assert isinstance(half, ModelConfig)
    assert half.num_layers == -(-whole.num_layers // 2) == len(half.compress_ratios)
    assert half.compress_ratios == whole.compress_ratios[: half.num_layers]
    assert set(half.index_sources) <= set(whole.index_sources)
    if half.engram is not None:
        assert half.engram.num_embeddings == table_rows(half.engram)
    assert (half.hidden_size, half.vision) == (whole.hidden_size, whole.vision)


@torch.no_grad()
def test_the_small_language_model_runs():
    model = CausalEncoderDecoder(small_language_model(mini_config()))
    init_weights(model, 1)
    model.set_token_map(token_map())
    assert model(Batch.from_documents([random_ids(20)])).hidden.isfinite().all()


def test_a_model_without_sources_below_has_none():
    config = replace(mini_config(), compress_ratios=(0,) * 9, kv_sources=(), index_sources=())
    half = small_language_model(replace(config, engram=None))
    assert (half.kv_sources, half.index_sources, half.engram) == ((), (), None)
