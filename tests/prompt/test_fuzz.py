"""Nothing that a message holds gets out of its place."""

import copy
import json

import pytest
from hypothesis import given, settings

from openv41.prompt import encode, from_request, parse
from tests.prompt.strategies import awkward_text, requests


def neutral(value):
    """The same request with every text of a user or a model replaced by letters."""
    if isinstance(value, str):
        return "x"
    if isinstance(value, list):
        return [neutral(item) for item in value]
    if isinstance(value, dict):
        return {f"k{place}": neutral(item) for place, item in enumerate(value.values())}
    return value


def neutral_request(request):
    request = copy.deepcopy(request)
    for message in request["messages"]:
        for block in [message] if isinstance(message["content"], str) else message["content"]:
            for field in {"content", "text"} & block.keys():
                block[field] = "x"
        if message.get("reasoning_content"):
            message["reasoning_content"] = "x"
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(neutral(arguments))
    for tool in request["tools"]:
        tool["function"]["description"] = "x"
    return request


def specials(request):
    return [text for text, is_special in encode(from_request(request)).pieces if is_special]


@pytest.mark.property
@settings(max_examples=80)
@given(request=requests(awkward_text))
def test_text_adds_no_special_token(request):
    assert specials(request) == specials(neutral_request(request))


@pytest.mark.property
@settings(max_examples=50)
@given(request=requests(awkward_text))
def test_a_prompt_is_its_pieces(request):
    prompt = encode(from_request(request))
    assert "".join(prompt.text[a:b] for a, b in prompt.special_ranges) == "".join(specials(request))
    assert all(
        left[1] <= right[0]
        for left, right in zip(prompt.special_ranges, prompt.special_ranges[1:], strict=False)
    )
    numbers = [
        block["image"]
        for message in request["messages"]
        if isinstance(message["content"], list)
        for block in message["content"]
        if block["type"] == "image"
    ]
    assert sorted(image.source for image in prompt.images) == sorted(numbers)


@pytest.mark.property
@settings(max_examples=50)
@given(request=requests(awkward_text))
def test_a_generated_answer_parses_where_the_prompt_says(request):
    """An answer right after any prompt that waits for one starts in the section it tells."""
    prompt = encode(from_request(request))
    answers = {"reasoning": "r</think>c", "content": "c", None: "c"}
    text = answers[prompt.section] + "<\uff5cend\u2581of\u2581sentence\uff5c>"
    found = parse(text, prompt.section or "content")
    assert (found.reasoning, found.content) == ("r" if prompt.section == "reasoning" else "", "c")
    if prompt.section:
        last = [text for text, is_special in prompt.pieces if is_special and "think" in text][-1]
        assert last == {"reasoning": "<think>", "content": "</think>"}[prompt.section]
