"""``openv41 serve`` before it serves."""

import importlib.util

from typer.testing import CliRunner

from openv41.cli.main import app


def run(*options):
    return CliRunner().invoke(app, ["serve", "nowhere", *options])


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run()
    assert result.exit_code == 2
    assert "needs fastapi, h11, prometheus_client, pydantic, uvicorn" in result.stderr
    assert "run pip install 'openv41[serve]'" in result.stderr


def test_limits_are_checked_before_the_checkpoint_is_read():
    result = run("--max-queue", "-1", "--request-seconds", "nan")
    assert result.exit_code == 2
    assert "max_queue is -1, must be at least 0" in result.stderr
    assert "request_seconds is nan" in result.stderr


def test_a_missing_checkpoint_is_a_plain_error():
    result = run()
    assert result.exit_code == 2
    assert "nowhere" in result.stderr
    assert "Traceback" not in result.stderr
