"""``openv41 serve`` before it serves."""

import importlib.util
import socket

from typer.testing import CliRunner

from openv41.cli.main import app


def run(*options):
    return CliRunner().invoke(app, ["serve", "nowhere", "--port", "0", *options])


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


def test_a_taken_port_is_found_before_the_checkpoint_is_read():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("--port", str(port))
    assert result.exit_code == 2
    assert f"cannot serve on 127.0.0.1:{port}: another program listens there" in result.stderr
    assert "choose another port with --port (0 takes a free one)" in result.stderr
    assert "nowhere" not in result.stderr


def test_an_address_of_another_machine_is_a_plain_error():
    result = run("--host", "192.0.2.1")
    assert result.exit_code == 2
    assert "cannot serve on 192.0.2.1:0: Cannot assign requested address; choose" in result.stderr
