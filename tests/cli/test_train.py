"""``openv41 train``: a small run by its command line; mistakes end with status 2."""

import json

import pytest
from typer.testing import CliRunner

from openv41.cli.main import app
from openv41.io.checkpoint import load_model
from openv41.io.tokenizer import load_tokenizer, train_tokenizer
from openv41.prompt import Conversation, Message
from openv41.train.sample_shards import prepare_sample_shards
from openv41.train.samples import Sample
from openv41.train.token_shards import prepare_shards

SMALL = (
    "tokens=70",  # two whole batches
    "sequence_length=16",
    "batch_tokens=32",
    "warmup_tokens=0",
    "model.hidden_size=16",
    "model.moe.num_experts=4",
    "model.moe.expert_dim=16",
    "model.engram.table_size=30",
    "optimizer.lr=3e-4",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("To be, or not to be, that is the question.\n" * 20)
    tokenizer = train_tokenizer([folder / "text.txt"], vocab_size=270)
    return prepare_shards([folder / "text.txt"], tokenizer, folder / "shards").folder


def invoke(data, out, *more, settings=SMALL):
    words = [word for setting in settings for word in ("--set", setting)]
    options = ["--data", str(data), "--out", str(out), *words, *more]
    return CliRunner().invoke(app, ["train", "tiny", *options])


def test_train_writes_a_model_of_its_tokenizer(data, tmp_path):
    out = tmp_path / "run"
    result = invoke(data, out, "--heldout", str(data))
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{out / 'checkpoint'}\n"
    assert "2 steps, 64 tokens, 0.1" in result.stderr
    assert " epochs of text, " in result.stderr
    assert "pretrain 2/2  loss 5." in result.stderr
    assert "pretrain 2  held-out text " in result.stderr
    [line] = [text for text in result.stderr.splitlines() if text.startswith("pretrain 2/2")]
    for field in ("tok/s", "FLOP/s", "lr ", "grad ", "load ", "0:00 left"):
        assert field in line
    assert len(line) <= 120
    model = load_model(out / "checkpoint")
    assert model.config.vocab_size == load_tokenizer(data).vocab_size == 270
    assert (model.config.hidden_size, model.config.moe.num_experts) == (16, 4)
    assert model.config.engram.compressed_vocab_size == int(model.token_map.max()) + 1
    run = json.loads((out / "run.json").read_text())
    assert run["stages"]["pretrain"]["optimizer"]["lr"] == 3e-4
    again = invoke(data, out)
    assert again.exit_code == 2
    assert "holds a run already; add --resume" in again.stderr
    other = invoke(data, out, "--resume", settings=(*SMALL, "seed=9"))
    assert other.exit_code == 2
    assert "heldout: the run has '" in other.stderr
    assert "stages.pretrain.seed: the run has 0, now it is 9" in other.stderr
    resumed = invoke(data, out, "--heldout", str(data), "--resume")
    assert resumed.exit_code == 0, resumed.stderr
    assert "from step 2" in resumed.stderr


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.moe.num_expert=3", "no setting 'model.moe.num_expert'; there are model.moe.num_"),
        ("learning_rate=3", "no setting 'learning_rate'; there are "),
        ("model.vocab_size=300", "model.vocab_size follows from other settings"),
        ("model.moe.top_k=many", "model.moe.top_k is 'many', must be a whole number"),
        ("model.moe.top_k=9", "top_k is 9, above num_experts (4)"),
        ("model.max_position=8", "sequence_length is 16, the model allows 8"),
        ("seed", "'seed' is not of the form key=value"),
    ],
)
def test_settings_that_do_not_work(data, tmp_path, setting, message):
    result = invoke(data, tmp_path / "run", settings=(*SMALL, setting))
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "run").exists()


def test_unknown_presets_and_data(data, tmp_path):
    result = CliRunner().invoke(
        app, ["train", "huge", "--data", str(data), "--out", str(tmp_path / "run")]
    )
    assert result.exit_code == 2
    assert "there is no preset 'huge'; choose one of tiny" in result.stderr
    result = invoke(tmp_path / "nowhere", tmp_path / "run")
    assert result.exit_code == 2
    assert "nowhere holds no token shards: there is no such folder; name a" in result.stderr
    (tmp_path / "tokenizer").mkdir()
    load_tokenizer(data).save(tmp_path / "tokenizer")
    result = invoke(tmp_path / "tokenizer", tmp_path / "run")
    assert result.exit_code == 2
    assert "tokenizer holds no token shards: it has no index.json; name" in result.stderr
    assert not (tmp_path / "run").exists()


def test_posttraining_on_conversations(tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n" * 20)
    tokenizer = train_tokenizer([tmp_path / "text.txt"], vocab_size=280, prompt_format=True)
    data = prepare_shards([tmp_path / "text.txt"], tokenizer, tmp_path / "text").folder
    messages = Message("user", "to be?"), Message("assistant", "not")
    chat = Sample("a", conversation=Conversation(messages, thinking=False), weights=(0.0, 1.0))
    sft = prepare_sample_shards([chat], tokenizer, None, tmp_path / "sft", max_tokens=32).folder
    options = ["--sft", str(sft), "--set", "posttrain.tokens=64"]
    result = invoke(data, tmp_path / "run", *options)
    assert result.exit_code == 2
    assert "--sft is for posttrain and dspark; add one to --stages" in result.stderr
    result = invoke(data, tmp_path / "run", *options, "--stages", "pretrain,posttrain")
    assert result.exit_code == 0, result.stderr
    assert "posttrain 4/4  loss" in result.stderr
    assert f"0.10 epochs of text and 2.00 epochs of 1 sample(s) from {sft}, " in result.stderr
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["stages"]["posttrain"]["bounded_replay"] == "first_layer_full_window"
    assert run["stages"]["posttrain"]["expert_fp4"] is True


def test_resume_needs_a_run(data, tmp_path):
    result = invoke(data, tmp_path / "run", "--resume")
    assert result.exit_code == 2
    assert "run holds no run to resume: there is no such folder; name the folder" in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "run").exists()


def test_explain_shows_one_rule_for_every_parameter():
    result = CliRunner().invoke(app, ["train", "tiny", "--explain"])
    assert result.exit_code == 0, result.stderr
    cells = [line.split() for line in result.stdout.splitlines() if line.strip()]
    lines = {name: " ".join(rest) for name, *rest in cells}
    assert "muon 2 x (32, 32) x 1 0.1 report" in lines["layers.*.attention.wq_b.weight"]
    assert "sinkhorn x 5 0 report" in lines["layers.*.engram.table.weight"]
    assert lines["layers.*.moe.gate.bias"] == "8 8 load balance report"
    assert lines["layers.*.moe.gate.weight"].endswith("0.1 ours")
    whole = CliRunner().invoke(
        app, ["train", "tiny", "--explain", "--set", "optimizer.head_wise=false"]
    )
    assert "2 x (32, 32)" not in whole.stdout
    assert "from decay" not in result.stdout


def test_explain_shows_what_rests_until_the_decay():
    words = ["--explain", "--stages", "vision,pretrain", "--set", "pretrain.tokens=3e6"]
    result = CliRunner().invoke(app, ["train", "tiny", *words[:3]])
    assert result.exit_code == 0, result.stderr
    cells = [line.split() for line in result.stdout.splitlines() if line.strip()]
    lines = {name: " ".join(rest) for name, *rest in cells}
    assert "x 0.1 from decay 0.1 report" in lines["vision.encoder.patch_embed.weight"]
    assert "x 1 0.1 report" in lines["vision.encoder.norm.weight"]
    assert "x 1 0.1 report" in lines["vision.projector.w1.weight"]
    assert "adamw x 1 0 ours" in lines["log_temperature"]
    assert "text.encoder.blocks.*.mlp.w1.weight" in lines
    refused = CliRunner().invoke(app, ["train", "tiny", *words])
    assert refused.exit_code == 2
    assert "pretrain.tokens is '3e6', must be a whole number" in refused.stderr


def test_training_needs_data_and_a_folder():
    result = CliRunner().invoke(app, ["train", "tiny"])
    assert result.exit_code == 2
    assert "name the token shards with --data" in result.stderr


@pytest.fixture(scope="module")
def base(data, tmp_path_factory):
    """A checkpoint of a small run."""
    out = tmp_path_factory.mktemp("base") / "run"
    assert invoke(data, out).exit_code == 0
    return out / "checkpoint"


def go_on(base, data, out, *more, preset=()):
    small = [word for setting in SMALL[:4] for word in ("--set", setting)]
    options = ["--from", str(base), "--data", str(data), "--out", str(out), *small, *more]
    return CliRunner().invoke(app, ["train", *preset, *options])


def test_a_run_goes_on_from_a_checkpoint_with_an_adapter_and_a_teacher(base, data, tmp_path):
    more = ["--set", "lora.rank=2", "--set", "lora.targets=wq_a,experts.*"]
    result = go_on(base, data, tmp_path / "run", *more, "--teacher", f"{base}=0.5")
    assert result.exit_code == 0, result.stderr
    experts, queries = 3 * 4 * 2 * (16 + 16), 2 * (16 + 32)  # of each of 8 layers
    assert f"{8 * (experts + queries):,} parameters to train (" in result.stderr
    assert " frozen); 2 steps" in result.stderr
    record = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])
    assert abs(record["distill_loss"]) < 1e-6
    assert "  distill " in result.stderr
    adapter = tmp_path / "run" / "adapter.safetensors"
    words = ["convert", str(base), str(tmp_path / "merged"), "--to", "float32"]
    result = CliRunner().invoke(app, [*words, "--adapter", str(adapter)])
    assert result.exit_code == 0, result.stderr
    merged, want = load_model(tmp_path / "merged"), load_model(tmp_path / "run" / "checkpoint")
    for name, value in want.state_dict().items():
        assert value.equal(merged.state_dict()[name]), name


def test_starting_points_that_do_not_work(base, data, tmp_path):
    out = tmp_path / "run"
    result = go_on(base, data, out, preset=["tiny"])
    assert "name either a preset or, with --from, a checkpoint" in result.stderr
    result = CliRunner().invoke(app, ["train", "--data", str(data), "--out", str(out)])
    assert "name either a preset or, with --from, a checkpoint" in result.stderr
    result = go_on(base, data, out, "--set", "model.moe.top_k=1")
    assert "model.moe.top_k follows from the checkpoint" in result.stderr
    result = go_on(base, data, out, "--images", str(data))
    assert "checkpoint has no vision encoder; leave out --images" in result.stderr
    result = go_on(
        base, data, out, "--stages", "pretrain,posttrain", "--set", "posttrain.lora.rank=2"
    )
    assert "posttrain.lora differs from that of pretrain" in result.stderr
    result = go_on(base, data, out, "--explain")
    assert "--explain shows the rules of a preset" in result.stderr
    result = go_on(base, data, out, "--set", "lora.rank=2", "--set", "freeze_vision=true")
    assert "pretrain.freeze_vision is true, and lora.rank is set" in result.stderr
    result = invoke(data, out, "--set", "lora.rank=2")
    assert "name the checkpoint that the adapter is for with --from" in result.stderr
    result = go_on(base, data, out, "--set", "lora.rank=2", "--set", "lora.targets=q_proj")
    assert "targets names 'q_proj', which is no linear layer" in result.stderr
    (tmp_path / "text.txt").write_text("Another text, of other words.\n" * 20)
    other = train_tokenizer([tmp_path / "text.txt"], vocab_size=270)
    shards = prepare_shards([tmp_path / "text.txt"], other, tmp_path / "shards").folder
    result = go_on(base, shards, out)
    assert f"prepare the text with --tokenizer {base}" in result.stderr
    assert result.exit_code == 2
    assert not out.exists()


def test_experts_of_one_process_are_not_parallel(data, tmp_path):
    result = invoke(data, tmp_path / "run", "--experts", "parallel")
    assert result.exit_code == 0, result.stderr
    assert "--experts parallel changes nothing" in result.stderr
