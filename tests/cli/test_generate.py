"""``openv41 generate``: text on stdout, equal for equal seeds; plain errors."""

import pytest
import torch
from typer.testing import CliRunner

from openv41.cli.main import app
from openv41.io.checkpoint import load_model
from openv41.io.tokenizer import load_tokenizer
from openv41.layers.batch import Batch
from tests.io.tiny_checkpoint import make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), max_position=12)


def run(checkpoint, *options, prompt="To be"):
    return CliRunner().invoke(app, ["generate", str(checkpoint), "--prompt", prompt, *options])


def test_it_writes_only_the_new_text(checkpoint):
    result = run(checkpoint, "--max-tokens", "5", "--temperature", "0", "--numerics", "f32")
    assert result.exit_code == 0, result.stderr
    model = load_model(checkpoint, dtype=torch.float32)
    tokenizer = load_tokenizer(checkpoint)
    ids = [0, *tokenizer.encode("To be")]
    with torch.no_grad():
        for _ in range(5):
            hidden = model(Batch.from_documents([ids])).hidden
            ids.append(int(model.logits(hidden[-1:])[0, : tokenizer.vocab_size].argmax()))
    assert result.stdout == tokenizer.decode(ids[-5:]) + "\n"


def test_seeds_and_numerics(checkpoint):
    options = ("--max-tokens", "4", "--top-k", "50", "--top-p", "0.9")
    first = run(checkpoint, *options, "--seed", "1")
    assert first.exit_code == 0, first.stderr
    assert run(checkpoint, *options, "--seed", "1").stdout == first.stdout
    assert run(checkpoint, *options, "--seed", "2").stdout != first.stdout
    rounded = run(checkpoint, *options, "--numerics", "released")
    assert rounded.exit_code == 0, rounded.stderr


def test_an_empty_prompt_starts_a_text_and_the_last_position_ends_it(checkpoint):
    result = run(checkpoint, "--max-tokens", "500", "--temperature", "0", prompt="")
    assert result.exit_code == 0, result.stderr
    assert "stopped: the text has reached position 12, the model's last" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--temperature", "-1"), "temperature is -1.0, must be at least 0"),
        (("--top-p", "0"), "top_p is 0.0, must be above 0"),
        (("--max-tokens", "0"), "max_tokens is 0, must be at least 1"),
    ],
)
def test_options_are_checked(checkpoint, options, message):
    result = run(checkpoint, *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_prompt_that_is_too_long_and_a_folder_that_is_no_checkpoint(checkpoint, tmp_path):
    result = run(checkpoint, prompt="x" * 60)
    assert result.exit_code == 2
    assert "the prompt has 61 tokens; there is room for 12" in result.stderr
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "config.json: 1 problem(s)" in result.stderr
