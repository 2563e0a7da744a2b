"""``openv41 train``: a small run by its command line; mistakes end with status 2."""

import json

import pytest
from typer.testing import CliRunner

from openv41.cli.main import app
from openv41.io.checkpoint import load_model
from openv41.io.tokenizer import load_tokenizer, train_tokenizer
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
    assert "2 steps, 64 tokens" in result.stderr
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
    assert "nowhere" in result.stderr
    assert not (tmp_path / "run").exists()


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
