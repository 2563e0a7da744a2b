"""LoRA: what the update is, what it learns, and that nothing else moves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from openv41.cli.main import app
from openv41.errors import CheckpointError, ConfigError, InputError
from openv41.io.checkpoint import load_model, save_model
from openv41.io.checkpoint_writer import read_companions
from openv41.layers.batch import Batch
from openv41.train.config import LoraConfig, OptimizerConfig
from openv41.train.loop import ADAPTER_FILE, Trainer
from openv41.train.lora import (
    adapt,
    linear_layers,
    load_adapted,
    load_adapter,
    merge,
    merged_state,
    save_adapter,
    updates,
)
from openv41.train.optimizer import Optimizers
from openv41.train.parameter_rules import is_adapter, pattern_of
from openv41.train.placement import distribute
from openv41.train.token_shards import prepare_shards
from tests.close import assert_close
from tests.layers.mini import mini_config, mini_model, random_ids
from tests.train.runs import changed, mini_run, read_log

pytestmark = [pytest.mark.unchecked, pytest.mark.xdist_group("lora")]  # built once

LENGTHS = (13, 1, 20)
ALL = LoraConfig(rank=2, alpha=3.0, targets=("*",))


def batch():
    return Batch.from_documents([random_ids(n, seed=n) for n in LENGTHS])


def logits(model):
    with torch.no_grad():
        return model.logits(model(batch()).hidden)


def fill(model, seed=0, std=0.3):
    """Give every B values, so that the updates count."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for update in updates(model).values():
            update.b.normal_(0, std, generator=generator)
    return model


def test_an_update_starts_at_nothing_and_reaches_every_kind_of_layer():
    model = mini_model(1, torch.float32)
    before = logits(model)
    adapt(model, ALL, seed=5)
    assert updates(model).keys() == linear_layers(model).keys()
    assert torch.equal(logits(model), before)
    model(batch()).hidden.square().sum().backward()
    reached = {pattern_of(n) for n, update in updates(model).items() if update.b.grad is not None}
    assert {"layers.*.moe.experts.w2", "layers.*.attention.wo_a", "layers.*.engram.wkv"} <= reached
    for name, update in updates(model).items():
        if ".indexer." not in name:  # which learns from attention alone
            assert update.b.grad.any(), name
            assert not update.a.grad.any(), name  # as long as B is zero


def by_loops(weight, a, b, scale):
    """W + scale * B A, element by element, of one matrix or of each in a stack."""
    if weight.ndim == 3:
        return np.stack([by_loops(*one, scale) for one in zip(weight, a, b, strict=True)])
    out = weight.copy()
    for row in range(out.shape[0]):
        for column in range(out.shape[1]):
            for k in range(a.shape[0]):
                out[row, column] += scale * b[row, k] * a[k, column]
    return out


def test_the_merged_weights_are_those_of_loops_and_give_the_same_logits():
    model, plain = mini_model(1, torch.float64), mini_model(1, torch.float64)
    adapt(model, ALL, seed=5)
    fill(model)
    merged, before = merged_state(model), plain.state_dict()
    assert merged.keys() == before.keys()
    for name, update in updates(model).items():
        key = f"{name}.weight"
        arrays = [t.detach().numpy() for t in (before[key], update.a, update.b)]
        assert_close(key, merged[key], torch.from_numpy(by_loops(*arrays, 1.5)), rtol=0, atol=1e-13)
    plain.load_state_dict(merged)
    want = logits(plain)
    assert not torch.allclose(want, logits(mini_model(1, torch.float64)), atol=0.1)
    assert_close("logits", logits(model), want, rtol=0, atol=1e-12)
    merge(model)
    assert not updates(model)
    assert_close("merged", logits(model), want, rtol=0, atol=1e-12)


def test_merging_in_float32_keeps_the_logits():
    model = mini_model(2, torch.float32)
    adapt(model, ALL, seed=5)
    want = logits(fill(model, std=0.05))
    merge(model)
    assert_close("merged", logits(model), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_the_chain_rule(recompute):
    """dA = s B^T G and dB = s G A^T, G the gradient of the whole weight."""
    model, plain = mini_model(3, torch.float64), mini_model(3, torch.float64)
    adapt(model, ALL, seed=5)
    plain.load_state_dict(merged_state(fill(model)))
    Optimizers(distribute(model), OptimizerConfig())
    Optimizers(distribute(plain), OptimizerConfig())
    for one in (model, plain):
        one(batch(), recompute=recompute).hidden.square().sum().backward()
    whole = {name: p.grad for name, p in plain.named_parameters()}
    seen = 0
    for name, update in updates(model).items():
        gradient = whole[f"{name}.weight"]
        if gradient is None:
            assert ".indexer." in name
            assert update.a.grad is None
            continue
        seen += gradient.ndim == 3
        want_a = 1.5 * torch.einsum("...or,...oi->...ri", update.b, gradient)
        want_b = 1.5 * torch.einsum("...oi,...ri->...or", gradient, update.a)
        assert_close(f"{name} a", update.a.grad, want_a, rtol=1e-8, atol=1e-9)
        assert_close(f"{name} b", update.b.grad, want_b, rtol=1e-8, atol=1e-9)
    assert seen == 3 * model.config.num_layers
    assert all(p.grad is None for n, p in model.named_parameters() if not is_adapter(n))


def test_targets_are_ends_of_names_or_patterns():
    def chosen(*targets):
        model = mini_model(1, torch.float32)
        adapt(model, LoraConfig(rank=1, targets=targets), seed=0)
        return set(updates(model))

    assert chosen("layers.3.attention.w*") == {
        f"layers.3.attention.{name}" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")
    }
    layers = range(mini_model(1).config.num_layers)
    assert chosen("experts.w2") == {f"layers.{n}.moe.experts.w2" for n in layers}
    default = chosen(*LoraConfig().targets)
    assert {pattern_of(name).split(".", 2)[2] for name in default} == {
        *(f"attention.{name}" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")),
        *(f"moe.{part}.{name}" for part in ("experts", "shared") for name in ("w1", "w2", "w3")),
    }
    message = r"targets names 'q_proj', which is no linear layer; there are layers\.\*\.attention"
    with pytest.raises(ConfigError, match=message):
        chosen("wq_a", "q_proj")
    with pytest.raises(ConfigError, match="which is no linear layer"):
        chosen("engram.table")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": -1}, "rank is -1, must be at least 0"),
        ({"alpha": 0.0}, "alpha is 0.0, must be above 0"),
        ({"rank": 4, "targets": ()}, "targets names no layer"),
    ],
)
def test_settings_that_do_not_work(settings, message):
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**settings)


@pytest.fixture(scope="module")
def shards(text_files, text_tokenizer, tmp_path_factory):
    return prepare_shards(text_files, text_tokenizer, tmp_path_factory.mktemp("run") / "data")


@pytest.fixture(scope="module")
def base(shards, tmp_path_factory):
    """A checkpoint to start from."""
    run = mini_run(shards, tmp_path_factory.mktemp("base") / "out", tokens=64)
    return Trainer(run, resume=False).fit()


def lora_run(shards, base, out, **changes):
    settings = {"warmup_tokens": 0, "activation_checkpointing": True, **changes}
    run = changed(mini_run(shards, out), lora=LoraConfig(rank=2), **settings)
    return replace(run, base=base)


@pytest.fixture(scope="module")
def finished(shards, base, tmp_path_factory):
    run = lora_run(shards, base, tmp_path_factory.mktemp("lora") / "out")
    trainer = Trainer(run, resume=False)
    trainer.fit()
    return trainer


def test_only_the_adapter_moves(finished, base):
    start = load_model(base).state_dict()
    for name, value in finished.model.state_dict().items():
        if is_adapter(name):
            assert name.endswith(".a") or value.abs().max() > 0, name
        else:
            assert torch.equal(value, start[name]), name
    groups = [group["name"] for group in finished.optimizer.groups]
    assert groups == ["adapter: adamw without decay"]


@pytest.mark.shapes
def test_the_written_model_is_the_merged_one_in_every_format(finished, base, tmp_path):
    trained, folder = finished.model, finished.run.out / "checkpoint"
    ids = Batch.from_documents([random_ids(20)])
    with torch.no_grad():
        want = trained(ids).hidden
        got = load_model(folder)(ids).hidden
        assert_close("hidden", got, want, rtol=0, atol=1e-6)
        assert not torch.allclose(load_model(base)(ids).hidden, want, atol=1e-4)
    alone = load_adapted(base, finished.run.out / ADAPTER_FILE).model
    merge(alone)
    for name, value in load_model(folder).state_dict().items():
        assert torch.equal(alone.state_dict()[name], value), name
    save_model(alone, tmp_path / "saved", companions=read_companions(base))
    adapter = str(finished.run.out / ADAPTER_FILE)
    words = ["convert", str(base), str(tmp_path / "converted"), "--to", "released"]
    result = CliRunner().invoke(app, [*words, "--adapter", adapter])
    assert result.exit_code == 0, result.stderr
    same = CliRunner().invoke(app, [*words[:2], *words[1:2], *words[3:], "--adapter", adapter])
    assert "source and destination are the same" in same.stderr
    saved, converted = (load_model(tmp_path / name) for name in ("saved", "converted"))
    assert saved.layers[0].moe.experts.w1.is_stored
    for name, value in saved.state_dict().items():
        assert torch.equal(converted.state_dict()[name].view(torch.uint8), value.view(torch.uint8))


def test_a_resumed_run_goes_on_alike(finished, shards, base, tmp_path):
    run = lora_run(shards, base, tmp_path / "part")
    part = Trainer(run, resume=False)
    run.out.mkdir()
    for _ in range(3):
        part._advance()
    part.save()
    resumed = Trainer(run, resume=True)
    resumed.fit()
    assert read_log(run.out) == read_log(finished.run.out)[3:]
    after = finished.model.state_dict()
    assert all(torch.equal(v, after[n]) for n, v in resumed.model.state_dict().items())
    for other in (replace(run, base=None), changed(run, lora=LoraConfig(rank=3))):
        with pytest.raises(ConfigError, match=r"(from: the run has '|lora\.rank: the run has 2)"):
            Trainer(other, resume=True)


def test_an_adapter_fits_its_own_model_alone(finished, shards, base, tmp_path):
    adapter = finished.run.out / ADAPTER_FILE
    other = finished.run.out / "checkpoint"
    with pytest.raises(CheckpointError, match="belongs to a checkpoint of hash"):
        load_adapted(other, adapter)
    moe = replace(mini_config().moe, expert_dim=4)
    narrow = mini_model(1, torch.float32, config=replace(mini_config(), moe=moe))
    with pytest.raises(CheckpointError, match=r"the model's layer has the shape"):
        load_adapter(narrow, adapter)
    small = mini_model(1, torch.float32)
    adapt(small, LoraConfig(rank=1, targets=("layers.8.attention.wkv",)), seed=0)
    save_adapter(small, tmp_path / "small.safetensors", LoraConfig(rank=1), None)
    with pytest.raises(CheckpointError, match="layer is not there"):
        load_adapter(load_model(base), tmp_path / "small.safetensors")
    with pytest.raises(InputError, match="is no LoRA adapter"):
        load_adapter(load_model(base), base / "model.safetensors")


def test_a_run_starts_from_the_weights_of_a_checkpoint(shards, base, tmp_path):
    """Without LoRA all of it is trained; the description holds the checkpoint's hash."""
    run = replace(mini_run(shards, tmp_path / "out", tokens=64), base=base)
    trainer, start = Trainer(run, resume=False), load_model(base).state_dict()
    assert all(torch.equal(v, start[n]) for n, v in trainer.model.state_dict().items())
    trainer.fit()
    assert not torch.equal(trainer.model.head.weight, start["head.weight"])
    with pytest.raises(ConfigError, match=r"from: the run has '\w{64}', now it is None"):
        Trainer(replace(run, base=None), resume=True)


def test_a_rank_above_every_layer_is_refused():
    model = mini_model(1)
    with pytest.raises(ConfigError, match=r"rank is 1000; the widest layer has \d+"):
        adapt(model, LoraConfig(rank=1000), seed=0)
