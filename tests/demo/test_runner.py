"""Stages: named, timed, and clear about what failed."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from demo import runner
from demo.pipeline import start_fresh
from demo.runner import Runner, StageError, shown
from openv41.errors import DataError


@pytest.fixture
def run():
    return Runner(Console(file=io.StringIO(), width=100), 2)


def test_stages_are_numbered_and_timed(run):
    with run.stage("corpus", "texts"):
        pass
    with run.stage("train", "a [model]"):
        run.say("two [lines]")
    text = run.console.file.getvalue()
    assert "[1/2] corpus  texts" in text
    assert "[2/2] train" in text
    assert "two [lines]" in text
    assert list(run.seconds) == ["corpus", "train"]
    assert 0 <= sum(run.seconds.values()) <= run.total_seconds


def test_error_names_the_stage(run):
    with (
        pytest.raises(StageError, match="stage 'data' failed: no such text"),
        run.stage("data", ""),
    ):
        raise DataError("no such text")
    assert run.seconds == {}


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Stand in for the openv41 program: says its words, fails when told to."""
    script = tmp_path / "openv41"
    script.write_text('#!/bin/sh\nprintf "%s;" "$@"\n[ "$1" != fail ] || exit 3\n')
    script.chmod(0o755)
    monkeypatch.setattr(runner.sysconfig, "get_path", lambda name: str(tmp_path))


def test_failed_command_names_itself_and_its_status(run, program, capfd):
    with pytest.raises(StageError, match=r"'openv41 fail a/b\.txt' ended with status 3"):
        run.command("fail", Path("a/b.txt"))
    assert capfd.readouterr().out == "fail;a/b.txt;"  # what it prints stays visible


def test_output_is_returned_on_request(run, program, capfd):
    assert run.command("generate", "--prompt", "two words\n", capture=True) == (
        "generate;--prompt;two words\n;"
    )
    assert capfd.readouterr().out == ""
    assert "$ openv41 generate --prompt 'two words" in run.console.file.getvalue()


def test_several_files_of_a_folder_are_shown_as_a_pattern():
    files = [Path("runs/text/a.txt"), Path("runs/text/b.txt"), Path("runs/text/c d.txt")]
    words = ["data", "prepare", *files, "--out", Path("runs/data")]
    assert shown(words) == "data prepare runs/text/*.txt --out runs/data"
    assert shown(["data", *files[1:]]) == "data runs/text/b.txt 'runs/text/c d.txt'"


def test_only_what_a_demo_wrote_is_removed(tmp_path):
    out = tmp_path / "demo"
    start_fresh(out)  # nothing there yet
    (out / "text").mkdir(parents=True)
    (out / "train" / "checkpoint").mkdir(parents=True)
    (out / "summary.json").write_text("{}")
    (out / "notes.txt").write_text("mine")
    start_fresh(out)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    with pytest.raises(StageError, match="holds files of something else; name a new folder"):
        start_fresh(out)
