"""``openv41 chat``: answers, commands, and a prefix cache across turns."""

from typer.testing import CliRunner

from openv41.cli.conversations import Settings, begin
from openv41.cli.main import app
from openv41.engine.engine import Engine
from openv41.engine.request import Event, FinishReason
from openv41.engine.sampler import SamplingConfig
from openv41.prompt.tokens import THINK_END
from openv41.server.backend import ServedModel
from openv41.server.conversation import read_transcript
from openv41.server.schemas import ChatBody
from tests.io.tiny_checkpoint import make_checkpoint, make_seeing
from tests.server.images import png


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


def test_a_turn_that_fails_is_not_kept(tmp_path):
    checkpoint = make_checkpoint(tmp_path)
    options = ("--temperature", "0", "--max-tokens", "6", "--numerics", "f32")
    runs = []
    for lines in (["Hello", "x" * 1000, "And then?"], ["Hello", "And then?"]):
        result = CliRunner().invoke(
            app, ["chat", str(checkpoint), *options], input="\n".join(lines) + "\n"
        )
        assert result.exit_code == 0, result.stderr
        runs.append(result)
    assert "no answer: request: 1 problem" in runs[0].stderr
    assert runs[0].stdout == runs[1].stdout


def test_a_transcript_is_that_of_the_server(tmp_path, monkeypatch):
    engine = Engine.load(make_checkpoint(tmp_path), numerics="f32")
    prompts = []

    def stream(request):
        prompts.append(request.prompt)
        yield Event(text=" Two.", finish_reason=FinishReason.STOP)

    monkeypatch.setattr(engine, "stream", stream)
    sampling = SamplingConfig()
    settings = Settings(
        sampling=sampling, max_tokens=6, system="Be brief.", thinking=False, effort=75
    )
    chat = begin(engine, settings)
    messages = [{"role": "system", "content": "Be brief."}]
    for text in ("One?", "Three?"):
        chat.answer(text)
        messages.append({"role": "user", "content": text})
        ids, _ = read_transcript(ChatBody(messages=messages), ServedModel.of(engine, "tiny"))
        assert prompts.pop() == ids
        messages.append({"role": "assistant", "content": "Two."})


def test_a_conversation_in_the_prompt_format(tmp_path):
    """Reasoning goes to stderr, answers to stdout; an image stands before its message."""
    checkpoint = make_seeing(tmp_path)
    (tmp_path / "cat.png").write_bytes(png(1))
    (tmp_path / "dog.png").write_bytes(b"no image")
    lines = ["question", "/image " + str(tmp_path / "cat.png"), "question", "/stats"]
    lines += ["/image " + str(tmp_path / "dog.png"), "/image " + str(tmp_path / "none.png")]
    runs = {}
    for mode in ("--thinking", "--no-thinking"):
        options = (mode, "--temperature", "0", "--max-tokens", "6", "--numerics", "f32")
        runs[mode] = CliRunner().invoke(
            app, ["chat", str(checkpoint), *options], input="\n".join(lines) + "\n"
        )
        assert runs[mode].exit_code == 0, runs[mode].stderr
        assert "dog.png: cannot be read as an image" in runs[mode].stderr
        assert "none.png: cannot be read" in runs[mode].stderr
        assert "plain transcript" not in runs[mode].stderr
    assert runs["--thinking"].stdout == "\n\n"  # it never stops reasoning
    answers = runs["--no-thinking"].stdout.split("\n")
    assert all(answers[:2])
    assert THINK_END not in runs["--no-thinking"].stdout


def test_an_effort_that_is_none(tmp_path):
    result = CliRunner().invoke(app, ["chat", str(tmp_path), "--effort", "medium"])
    assert result.exit_code == 2
    assert "must be an integer from 1 to 100 or one of low, high, max" in result.stderr


def test_lines_that_cannot_be_read(tmp_path):
    """They are told, and the conversation goes on."""
    checkpoint = make_seeing(tmp_path)
    lines = b"/image a\0b.png\n\xff\xfe hello\n/stats\n/quit\n"
    result = CliRunner().invoke(app, ["chat", str(checkpoint)], input=lines)
    assert result.exit_code == 0, result.stderr
    assert "cannot be read: embedded null byte" in result.stderr
    assert "the line is not UTF-8 text" in result.stderr
    assert "0 tokens, 0 of the last prompt's found" in result.stderr
