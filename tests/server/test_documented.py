"""What docs/serving.md shows, against a server."""

import itertools
import json
import re
import shlex
from dataclasses import replace

import httpx
import pytest

from tests.conftest import REPOSITORY
from tests.server.conftest import running

PAGE = (REPOSITORY / "docs" / "serving.md").read_text(encoding="utf-8")
CURLS = re.findall(r"^curl (?:.*\\\n)*.*$", PAGE, re.MULTILINE)
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def mine(model):
    with running(replace(model, name="mine"), api_key="secret") as server:
        yield server


def asked(line, server):
    """Answer to a curl line; it has options -N, -H and -d."""
    words, headers, body = shlex.split(line.replace("\\\n", " "))[1:], {}, None
    url = next(word for word in words if word.startswith(ADDRESS))
    for option, value in itertools.pairwise(words):
        if option == "-H":
            name, _, content = value.partition(": ")
            headers[name] = content
        elif option == "-d":
            body = value
    url = server.url + url.removeprefix(ADDRESS)
    return httpx.post(url, headers=headers, content=body, trust_env=False)


def test_the_lines_of_curl_work_as_they_are_written(mine):
    whole, stream = (asked(line, mine) for line in CURLS)
    assert whole.status_code == stream.status_code == 200, (whole.text, stream.text)
    assert whole.json()["choices"][0]["text"]
    events = re.findall("^data: (.*)$", stream.text, re.MULTILINE)
    assert events[-1] == "[DONE]"
    said = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert any(delta.get("content") or delta.get("reasoning_content") for delta in said)


def test_the_key_is_asked_for_below_v1_alone(mine):
    assert mine.get("/v1/models").status_code == 401
    assert mine.get("/health").status_code == 200
    assert "openv41_running" in mine.get("/metrics").text


def test_a_body_without_its_type_is_told_what_is_missing(mine):
    for line in CURLS:
        answer = asked(line.replace("-H 'Content-Type: application/json'", ""), mine)
        assert answer.status_code == 400
        assert "without 'Content-Type: application/json'" in answer.json()["error"]["message"]
