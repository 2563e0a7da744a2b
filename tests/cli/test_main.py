"""The command line's own behaviour: errors, exit codes, output streams."""

import inspect
import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from openv41.cli.device import resolve_device
from openv41.cli.main import Commands, app
from openv41.cli.on_demand import OnDemand
from openv41.errors import InputError

NEEDS_NO_TORCH = (
    ["--help"],
    ["--version"],
    ["where", "2.2"],
    ["plan", "--help"],
    ["data", "prepare", "--help"],
    ["tokenizer", "train", "--help"],
)
NEEDS_NO_OTHERS = (["train", "--help"],)  # what only several processes need
PROBE = """
import json, sys
from openv41.cli.main import app
watched = {"numpy", "torch"} | {f"torch.distributed.{n}" for n in ("checkpoint", "fsdp", "tensor")}
for words in json.loads(sys.argv[1]):
    app(words, standalone_mode=False)
    print(json.dumps(sorted(watched & set(sys.modules))), file=sys.stderr)
"""


def run(*args):
    return CliRunner().invoke(app, args)


def failing_app(error):
    broken = typer.Typer(cls=Commands)

    @broken.callback()
    def root():
        pass

    @broken.command()
    def fail():
        raise error

    return broken


def test_user_error_is_one_plain_line_on_stderr_and_status_2():
    result = CliRunner().invoke(failing_app(InputError("shape [t, h] is odd")), ["fail"])
    assert result.exit_code == 2
    assert result.stderr == "error: shape [t, h] is odd\n"
    assert result.stdout == ""


def test_interrupt_is_one_line_and_status_130():
    result = CliRunner().invoke(failing_app(KeyboardInterrupt()), ["fail"])
    assert result.exit_code == 130
    assert result.stderr == "error: interrupted\n"


def test_a_bug_keeps_its_traceback():
    result = CliRunner().invoke(failing_app(ZeroDivisionError("bug")), ["fail"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_a_path_that_the_system_refuses_is_a_plain_message():
    result = CliRunner().invoke(failing_app(OSError(36, "File name too long", "x")), ["fail"])
    assert result.exit_code == 2
    assert result.stderr == "error: x: File name too long\n"


def test_an_overlong_name_is_no_preset():
    result = run("plan", "x" * 300)
    assert result.exit_code == 2
    assert "File name too long" in result.stderr


@pytest.mark.parametrize("name", ["", "zzz", "meta", "cuda:99"])
def test_a_device_that_is_not_there(name):
    with pytest.raises(InputError, match=f"--device is '{name}'"):
        resolve_device(name)


def test_version_is_that_of_the_package():
    assert run("--version").stdout.strip() == "0.1.0"


def test_where_prints_file_line_and_summary():
    result = run("where", "2.2")
    assert result.exit_code == 0
    assert "§2.2  src/openv41/plan.py:1  The layer plan" in result.stdout


def test_where_includes_the_sections_below():
    lines = run("where", "2.3").stdout.splitlines()
    assert {line.split()[0] for line in lines} >= {"§2.3", "§2.3.1", "§2.3.2"}


@pytest.mark.parametrize("section", ["9", "2.3.9", "x"])
def test_where_names_the_known_sections(section):
    result = run("where", section)
    assert result.exit_code == 2
    assert f"no section '{section}' here; known are 2.1, 2.1.1" in result.stderr


def commands(group=None):
    for command in (group or typer.main.get_command(app)).commands.values():
        if isinstance(command, OnDemand):
            yield command
        else:
            yield from commands(command)


def test_what_a_list_says_of_a_command_is_what_the_command_says():
    found = list(commands())
    assert len(found) > 20
    for command in found:
        loaded = command.load()
        first, _, _ = inspect.cleandoc(loaded.help).partition("\n\n")
        assert command.help == first.replace("\n", " ")
        assert command.name == loaded.name


def test_nothing_heavy_is_imported_before_it_is_needed():
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(NEEDS_NO_TORCH + NEEDS_NO_OTHERS)],
        capture_output=True,
        text=True,
        check=True,
    )
    *light, train = map(json.loads, done.stderr.splitlines())
    assert len(light) == len(NEEDS_NO_TORCH)
    assert light[:3] == [[], [], []]
    assert not any("torch" in names for names in light)
    assert train == ["numpy", "torch"]


def test_a_command_that_is_not_there():
    assert "Did you mean 'plan'?" in run("pla").stderr
    assert "Did you mean 'prepare'?" in run("data", "prepar").stderr
