"""SIGTERM: new requests are refused in words, running ones finish within a bound, status 0."""

import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

COMPLETIONS = "/v1/completions"


class Streaming(threading.Thread):
    """A client that reads a stream to its end."""

    def __init__(self, url, **body):
        super().__init__()
        self.url, self.body = url, body
        self.begun = threading.Event()
        self.text = ""
        self.broken = None

    def run(self):
        try:
            self._read()
        except httpx.RemoteProtocolError as error:
            self.broken = error

    def _read(self):
        with (
            httpx.Client(base_url=self.url, timeout=10, trust_env=False) as client,
            client.stream("POST", COMPLETIONS, json={**self.body, "stream": True}) as answer,
        ):
            for piece in answer.iter_text():
                self.text += piece
                self.begun.set()

    def begin(self):
        self.start()
        assert self.begun.wait(5)


def test_the_command_finishes_what_runs_and_exits_with_0(checkpoint):
    command = [sys.executable, "-W", "error", "-m", "openv41", "serve", checkpoint, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        try:
            line = child.stderr.readline()
            assert line.startswith("tiny is served at http://127.0.0.1:"), line
            url = line.split()[-1].removesuffix("/v1")
            reader = Streaming(url, prompt="To be", ignore_eos=True, max_tokens=240)
            reader.begin()
            child.send_signal(signal.SIGTERM)
            with httpx.Client(base_url=url, trust_env=False) as client:
                while client.get("/health").status_code == 200:
                    time.sleep(0.01)
                refused = client.post(COMPLETIONS, json={"prompt": "new"})
            assert reader.is_alive()
            assert child.wait(30) == 0
            reader.join()
        finally:
            if child.poll() is None:
                child.kill()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert refused.headers["retry-after"] == "1"
    assert reader.text.endswith("data: [DONE]\n\n")
    assert reader.text.count('"finish_reason":"length"') == 1


def stop(server):
    """Do what a signal does; signals themselves reach the main thread alone."""
    server.server.handle_exit(signal.SIGTERM, None)


def seconds_until_stopped(server):
    began = time.monotonic()
    server.wait_for(lambda: server.backend.is_stopped)
    return time.monotonic() - began


def test_the_wait_for_running_answers_is_bounded(start):
    server = start(drain_seconds=0.3)
    readers = [Streaming(server.url, prompt="!hang") for _ in range(2)]
    for reader in readers:
        reader.begin()
    waiting = threading.Thread(target=lambda: whole.append(server.post(COMPLETIONS, json=body)))
    whole, body = [], {"prompt": "!hang"}
    waiting.start()
    server.wait_for(lambda: server.backend.running == 3)
    stop(server)
    assert 0.3 <= seconds_until_stopped(server) < 3
    for reader in readers:
        reader.join()
        assert '"code": "draining"' in reader.text
        assert "[DONE]" not in reader.text
    waiting.join()
    assert whole[0].status_code == 503
    assert server.backend.cancelled == 3


def test_an_idle_server_stops_at_once(start):
    server = start(drain_seconds=30.0)
    assert server.get("/health").status_code == 200
    stop(server)
    assert seconds_until_stopped(server) < 2


def test_a_second_signal_does_not_wait(start):
    server = start(drain_seconds=30.0)
    reader = Streaming(server.url, prompt="!hang")
    reader.begin()
    stop(server)
    server.wait_for(lambda: server.service.lifecycle.is_draining)
    stop(server)
    server.wait_for(lambda: not reader.is_alive())
    assert "incomplete" in str(reader.broken)
    assert "[DONE]" not in reader.text


@pytest.mark.parametrize("path", ["/v1/models", "/health"])
def test_a_server_that_drains_says_so(start, path):
    server = start(drain_seconds=1.0)
    reader = Streaming(server.url, prompt="!hang")
    reader.begin()
    stop(server)
    refused = server.get(path)
    assert refused.status_code == 503
    assert refused.json()["error"]["type"] == "unavailable_error"
    assert server.get("/metrics").status_code == 200
