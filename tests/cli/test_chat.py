"""``openv41 chat``: answers, commands, and a prefix cache across turns."""

from typer.testing import CliRunner

from openv41.cli.main import app
from tests.server.tiny import make_checkpoint


def test_a_conversation(tmp_path):
    checkpoint = make_checkpoint(tmp_path)
    lines = ["Hello", "", "And then? " * 8, "/stats", "/new", "/what", "Hello", "/quit", "never"]
    options = ("--temperature", "0", "--max-tokens", "6", "--numerics", "f32")
    result = CliRunner().invoke(
        app, ["chat", str(checkpoint), *options], input="\n".join(lines) + "\n"
    )
    assert result.exit_code == 0, result.stderr
    answers = result.stdout.split("\n")
    assert len(answers) == 4
    assert answers[0] == answers[2]
    assert "prefill rows skipped" in result.stderr
    assert "found in the cache" in result.stderr
    assert "0 of the last prompt's found" not in result.stderr
    assert "no command /what: /new starts afresh" in result.stderr
