"""A fixture obeys its rules, is read back, and depends on its options alone."""

import hashlib
import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from openv41.errors import InputError
from openv41.io.checkpoint import load_model, save_model
from openv41.io.compare import compare_tensors
from openv41.io.fixture import (
    FixtureOptions,
    draw_inputs,
    fixture_config,
    make_fixture,
    toy_tokenizer,
)
from openv41.io.fixture_rules import check_draft_rules
from openv41.io.hf_config import read_config, read_variant
from openv41.io.tensor_files import read_metadata, read_tensors
from openv41.io.token_classes import compress_vocabulary
from openv41.io.trace import run_case
from openv41.io.trace_inputs import Inputs
from tests.close import assert_close

pytestmark = [pytest.mark.unchecked, pytest.mark.xdist_group("fixture")]  # built once

SMALL = FixtureOptions(seed=5, vocab_size=64, hidden_size=32, num_experts=2, outputs=False)


def digest(folder):
    hashed = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            hashed[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashed


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fixture") / "seed0"
    return folder, make_fixture(folder, FixtureOptions())


@pytest.mark.slow
def test_every_rule_is_met_and_measured(made):
    _, rules = made
    figures = {rule.name: rule.value for rule in rules}
    assert [rule.name for rule in rules if not rule.is_met] == []
    assert figures["windows in the text"] == pytest.approx(127 / 6)
    assert figures["entries per selected one, ratio 2"] == pytest.approx(63 / 6)
    assert figures["entries in the partial newest block"] == 127 % 4
    assert figures["rows without an entry"] == 1
    assert figures["exact ties at the edge of a selection"] > 20
    assert 100 < figures["SwiGLU lanes above the limit"] < 10 * 127 * 2 * 64 / 4
    assert figures["different primes"] == 12


@pytest.mark.slow
def test_text_trace_agrees_with_the_float64_outputs(made):
    folder, _ = made
    inputs = Inputs.read(folder / "inputs.safetensors")
    model = load_model(folder / "checkpoint", dtype=torch.float32)
    got = run_case(model, inputs, "prefill", "f32")
    want = read_tensors(folder / "prefill_f64.safetensors")
    result = compare_tensors(want, got, bounds="f32")
    assert result.is_equal, result.first
    assert want["logits"].dtype == torch.float64
    assert want["logits"].std() > 0.5


@pytest.mark.slow
def test_drafts_agree_with_the_float64_outputs(made):
    """And those behind a whole prompt are those of the decode that passes there."""
    folder, _ = made
    inputs = Inputs.read(folder / "inputs.safetensors")
    model = load_model(folder / "checkpoint", dtype=torch.float32)
    want = read_tensors(folder / "decode_f64.safetensors")
    result = compare_tensors(want, run_case(model, inputs, "decode", "f32"), bounds="f32")
    assert result.is_equal, result.first
    prompts = read_tensors(folder / "prompts_f64.safetensors")
    shared = [name for name in want if name.startswith("dspark")]
    assert len(shared) == 4
    row = want["positions"].tolist().index(int(prompts["prompt_lengths"][-1]) - 1)
    for name in shared:
        assert_close(name, prompts[name][-1], want[name][row], atol=1e-9)
    biased = prompts["dspark_logits"].argmax(dim=-1)
    assert torch.equal(biased, prompts["dspark_tokens"][:, 1:].long())
    assert "`dspark_confidence` are logits too" in (folder / "README.md").read_text()


def test_a_drafter_that_could_be_wrong_unseen_breaks_rules(made):
    folder, rules = made
    assert {"draft windows that are not": 4, "blocks that differ": 26}.items() <= {
        rule.name: rule.value for rule in rules
    }.items()
    model = load_model(folder / "checkpoint", dtype=torch.float64)
    decoded = read_tensors(folder / "decode_f64.safetensors")
    tokens = decoded["dspark_tokens"].clone()
    tokens[:, 1:] = decoded["dspark_base_logits"].argmax(dim=-1)
    dull = {**decoded, "dspark_tokens": tokens[:1].expand(len(tokens), -1)}
    dull["dspark_confidence"] = dull["dspark_confidence"].abs()
    dull["dspark_base_logits"] = dull["dspark_base_logits"][:1].expand(len(tokens), -1, -1)
    inputs = {"prompt_lengths": torch.tensor([7, 8, 9])}
    broken = {
        rule.name for rule in check_draft_rules(model, inputs, {"decode": dull}) if not rule.is_met
    }
    assert broken == {
        "draft windows that are not",
        "blocks that differ",
        "drafts that the Markov bias changes",
        "confidences on either side of a half",
    }


@pytest.mark.parametrize("quantised", [True, False])
def test_a_preset_gets_a_drafter_whose_tensors_come_back(tmp_path, quantised):
    options = replace(SMALL, preset="tiny", drafter=True, quantised=quantised)
    make_fixture(tmp_path / "x", options)
    before = stored(tmp_path / "x" / "checkpoint")
    drafter = {name for name in before if name.startswith("mtp.")}
    config = read_config(tmp_path / "x" / "checkpoint")
    assert {name.split(".")[1] for name in drafter} == {"0", "1", "2"}
    assert "mtp.2.markov_head.embed.weight" in drafter
    assert (config.dspark.num_stages, config.dspark.noise_token_id) == (3, 62)
    model = load_model(tmp_path / "x" / "checkpoint")
    variant = "released" if quantised else "bfloat16"
    save_model(model, tmp_path / "again", variant=variant, companions={})
    after = stored(tmp_path / "again")
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert (after[name].dtype, after[name].shape) == (value.dtype, value.shape), name
        same = after[name].contiguous().view(torch.uint8) == value.contiguous().view(torch.uint8)
        assert bool(same.all()), name


def stored(checkpoint):
    """Tensors of a checkpoint, as they are in its files."""
    files = sorted(checkpoint.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def test_without_a_drafter_there_are_no_drafts(tmp_path):
    options = replace(SMALL, drafter=False, outputs=True)
    rules = make_fixture(tmp_path / "x", options)
    assert not [rule.name for rule in rules if "draft" in rule.name]
    assert not [name for name in stored(tmp_path / "x" / "checkpoint") if name.startswith("mtp.")]
    for case in ("decode", "prompts"):
        names = read_tensors(tmp_path / "x" / f"{case}_f64.safetensors")
        assert "logits" in names
        assert not [name for name in names if name.startswith("dspark")]
    assert "dspark" not in (tmp_path / "x" / "README.md").read_text()
    assert fixture_config(replace(SMALL, preset="tiny"))[0].dspark is None


@pytest.mark.slow
def test_image_trace_agrees_with_the_float64_outputs(made):
    folder, _ = made
    inputs = Inputs.read(folder / "inputs.safetensors")
    model = load_model(folder / "checkpoint", dtype=torch.float32)
    want = read_tensors(folder / "image_f64.safetensors")
    result = compare_tensors(want, run_case(model, inputs, "image", "f32"), bounds="f32")
    assert result.is_equal, result.first
    found = read_tensors(folder / "inputs.safetensors")
    assert want["logits"].shape == (len(found["image_ids"]), model.config.vocab_size)
    types = found["image_token_types"]
    assert torch.equal(found["image_ids"] == model.config.image_token_id, types >= 0)
    assert (types == 0).nonzero().flatten().tolist() == found["image_starts"].tolist()
    gate = want["layers.1.engram_gate"]
    assert torch.equal((gate == 0).all(dim=1), types >= 0)
    assert want["image0.vision_out"].std() > 0.5
    assert "`image_f64`" in (folder / "README.md").read_text()


@pytest.mark.slow
def test_prompts_and_decode_equal_rows_of_the_prefill(made):
    folder, _ = made
    logits = read_tensors(folder / "prefill_f64.safetensors")["logits"]
    prompts = read_tensors(folder / "prompts_f64.safetensors")
    rows = prompts["prompt_lengths"].long() - 1
    assert rows.tolist()[:5] == [0, 1, 2, 4, 5]
    assert_close("prompts", prompts["logits"], logits[rows], atol=1e-10)
    decoded = read_tensors(folder / "decode_f64.safetensors")
    assert_close("decode", decoded["logits"], logits[decoded["positions"].long()], atol=1e-10)


@pytest.mark.slow
def test_outputs_say_whose_they_are(made):
    folder, _ = made
    assert "not an independent" in read_metadata(folder / "prefill_f64.safetensors")["made_by"]
    text = (folder / "README.md").read_text()
    assert "NOT MET" not in text
    assert "They are **not** an independent" in text


def test_same_options_give_the_same_bytes_whatever_the_global_generator(tmp_path):
    make_fixture(tmp_path / "a", SMALL)
    torch.manual_seed(99)
    torch.rand(7)
    make_fixture(tmp_path / "b", SMALL)
    first = digest(tmp_path / "a")
    assert first == digest(tmp_path / "b")
    assert len(first) > 12


@pytest.mark.shapes
def test_another_seed_gives_other_weights_and_tokens(tmp_path):
    make_fixture(tmp_path / "a", SMALL)
    make_fixture(tmp_path / "b", replace(SMALL, seed=6))
    a, b = (load_model(tmp_path / name / "checkpoint") for name in "ab")
    assert not torch.equal(a.embed.weight, b.embed.weight)
    ids = [read_tensors(tmp_path / name / "inputs.safetensors")["text_ids"] for name in "ab"]
    assert not torch.equal(*ids)


def test_a_model_without_eyes_has_no_image_case():
    config, _ = fixture_config(SMALL)
    seeing, blind = (draw_inputs(c, SMALL) for c in (config, replace(config, vision=None)))
    images = {name for name in seeing if name.startswith("image")}
    assert {"image_ids", "image0.patches", "image1.patches", "image_grids_llm"} < images
    assert blind.keys() == seeing.keys() - images
    for name, value in blind.items():
        assert torch.equal(value, seeing[name]), name


@pytest.mark.parametrize(("quantised", "variant"), [(True, "released"), (False, "bfloat16")])
def test_checkpoint_is_read_back(tmp_path, quantised, variant):
    make_fixture(tmp_path / "x", replace(SMALL, quantised=quantised))
    checkpoint = tmp_path / "x" / "checkpoint"
    assert read_variant(checkpoint) == variant
    config = read_config(checkpoint)
    assert (config.vocab_size, config.hidden_size, config.moe.num_experts) == (64, 32, 2)
    model = load_model(checkpoint)
    assert model.layers[0].attention.wq_a.is_stored == quantised
    assert model.token_map.unique().numel() == config.engram.compressed_vocab_size < 40


def test_norms_are_spread_and_biases_are_not_zero(tmp_path):
    make_fixture(tmp_path / "x", SMALL)
    model = load_model(tmp_path / "x" / "checkpoint", dtype=torch.float32)
    for name, value in model.named_parameters():
        if re.search(r"norm\.weight|[qk]_weight", name):
            assert value.min() >= 0.5, name
            assert value.max() <= 1.5, name
            assert value.std() > 0.1, name
        elif re.search(r"(bias|bias_vl|base|sink)$", name):
            assert value.abs().min() > 0, name


def test_two_classes_of_words_collapse():
    tokenizer = toy_tokenizer(64)
    content = json.loads(tokenizer)
    assert len(content["model"]["vocab"]) == 64
    backend = Tokenizer.from_str(tokenizer)
    token_map = compress_vocabulary(backend)
    vocab = content["model"]["vocab"]
    same = {token_map[vocab[word]] for word in ("w1", " W1", "\u1e831")}
    assert len(same) == 1
    assert token_map[vocab["q1  r"]] == token_map[vocab[" Q1 R"]] not in same


def test_without_ties_the_index_has_eight_heads():
    with_ties, _ = fixture_config(FixtureOptions())
    without, _ = fixture_config(FixtureOptions(ties=False))
    assert (with_ties.indexer.num_heads, without.indexer.num_heads) == (2, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 10}, r"length is 10, must be in 64\.\.488"),
        ({"length": 500}, r"length is 500, must be in 64\.\.488"),
        ({"vocab_size": 9}, "vocab_size is 9, must be at least 64"),
        ({"preset": "huge"}, "there is no preset 'huge'"),
    ],
)
def test_impossible_options_are_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        make_fixture(tmp_path / "x", FixtureOptions(**options))
    assert not (tmp_path / "x").exists()


def test_a_used_folder_is_refused(tmp_path):
    (tmp_path / "keep").write_text("mine")
    with pytest.raises(InputError, match="is not empty"):
        make_fixture(tmp_path, SMALL)
    assert (tmp_path / "keep").read_text() == "mine"
