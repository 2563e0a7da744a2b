"""Agreement on generated conversations and on image token counts, documented differences apart.

A conversation that renders differently is rendered once more without what is known to differ. Then
both must be equal; what had to go is counted, and anything else is listed as undocumented.
"""

import copy
import json
import math
import random

from hypothesis import HealthCheck, Phase, given, settings

from openv41.config import VisionConfig
from openv41.image_grid import grid_of
from openv41.prompt import encode, from_request
from tests.prompt.strategies import awkward_text, requests

CONVERSATIONS = 1600
SIZES = 20_000
LONGEST = 30_000  # side of an image in pixels
STRETCHED = 14.5  # aspect from which the two round differently
SEED = 0
QUESTION = {"role": "user", "content": "q"}
RELEASED = VisionConfig(num_layers=32, hidden_size=1024, num_heads=16, intermediate_size=2816)


def prompt_line(render):
    """Compare prompts; `render` gives the peer's text and special ranges of a request."""
    replaced, causes = dict.fromkeys(MISSING, 0), dict.fromkeys(DIFFERENCES, 0)
    equal, undocumented = 0, []
    found = dict.fromkeys(map(json.dumps, generated()))
    for text in found:
        request, names = _without(json.loads(text), MISSING)
        for name in names:
            replaced[name] += 1
        if _same(request, render):
            equal += 1
            continue
        repaired, names = _without(request, DIFFERENCES)
        if not _same(repaired, render):
            undocumented.append(request)
            continue
        for name in names:
            rest = {other: repair for other, repair in DIFFERENCES.items() if other != name}
            causes[name] += not _same(_without(request, rest)[0], render)
    return {
        "what": "prompts and special ranges",
        "conversations": len(found),
        "equal": equal,
        "equal_without_documented_differences": len(found) - equal - len(undocumented),
        "documented_differences": causes,
        "settings_the_peer_lacks": replaced,
        "undocumented": undocumented,
        "agrees": not undocumented,
    }


def image_token_line(count):
    """Compare lengths of image spans; `count` gives the peer's for a width and a height."""
    draw = random.Random(SEED)
    sizes = [(_side(draw), _side(draw)) for _ in range(SIZES)]
    different = []
    for width, height in sizes:
        ours, theirs = grid_of(width, height, RELEASED).span_length, count(width, height)
        if ours != theirs:
            different.append([width, height, ours, theirs])
    aspects = [max(w, h) / min(w, h) for w, h, _, _ in different]
    return {
        "what": "image token counts",
        "sizes": SIZES,
        "longest_side": LONGEST,
        "equal": SIZES - len(different),
        "documented_differences": {
            f"aspect of at least {STRETCHED}:1": sum(a >= STRETCHED for a in aspects)
        },
        "smallest_aspect_that_differs": min(aspects, default=None),
        "different": different,
        "agrees": all(aspect >= STRETCHED for aspect in aspects),
    }


def generated():
    """Return requests of the property tests' strategy, the same ones as long as the code is."""
    found = []

    @settings(
        max_examples=CONVERSATIONS,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(request=requests(awkward_text))
    def collect(request):
        found.append(request)

    collect()
    return found


def _same(request, render):
    prompt = encode(from_request(request))
    return (prompt.text, prompt.special_ranges) == render(request)


def _without(request, repairs):
    """Return the request after `repairs`, and the names of those that changed it."""
    names = []
    for name, repair in repairs.items():
        before, request = request, copy.deepcopy(request)
        repair(request)
        names += [name] if before != request else []
    return request, names


def _side(draw):
    return round(math.exp(draw.uniform(0, math.log(LONGEST))))


def _effort_name(request):
    request["reasoning_effort"] = ("low", "high", "max")[request["reasoning_effort"] % 3]


def _dropped_thinking(request):
    request["drop_thinking"] = True


def _own_generation_prompt(request):
    request["add_generation_prompt"] = None


def _text_reminders(request):
    for message in request["messages"]:
        if message["role"] == "latest_reminder" and isinstance(message["content"], list):
            texts = [block for block in message["content"] if block["type"] == "text"]
            message["content"] = texts


def _whole_tools(request):
    for tool in request["tools"]:
        tool["function"].setdefault("parameters", {"type": "object", "properties": {}})


def _no_reminder_after_question(request):
    kept = []
    for message in request["messages"]:
        if message["role"] != "latest_reminder" or not _asks(kept):
            kept.append(message)
    request["messages"] = kept


def _questions_before_answers(request):
    kept = []
    for message in request["messages"]:
        if message["role"] == "assistant" and not _asks(kept):
            kept.append(QUESTION)
        kept.append(message)
    request["messages"] = kept if _asks(kept) else [*kept, QUESTION]


def _asks(messages):
    """Whether an answer may follow: after a user, a result, a system message but the first."""
    last = messages[-1]["role"] if messages else ""
    return last in ("user", "tool") or (last == "system" and len(messages) > 1)


def _one_reminder_at_a_time(request):
    kept = []
    for message in request["messages"]:
        if not kept or {message["role"], kept[-1]["role"]} != {"latest_reminder"}:
            kept.append(message)
    request["messages"] = kept


def _distinct_calls(request):
    for message in request["messages"]:
        seen = set()
        for place, call in enumerate(message.get("tool_calls", ())):
            if call["id"] in seen:
                call["id"] = f"call {place}"
            seen.add(call["id"])


def _short_integers(request):
    _change_arguments(request, lambda value: 17 if _is_long(value) else value)


def _finite_numbers(request):
    _change_arguments(request, lambda value: 0.5 if value in (math.inf, -math.inf) else value)


def _is_long(value):
    return type(value) is int and not -(2**63) <= value < 2**64


def _change_arguments(request, change):
    for message in request["messages"]:
        for call in message.get("tool_calls", ()):
            arguments = _changed(json.loads(call["function"]["arguments"]), change)
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)


def _changed(value, change):
    if isinstance(value, dict):
        return {key: _changed(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    return change(value)


# What the peer has no setting for; replaced before the first comparison.
MISSING = {
    "effort as an integer": _effort_name,
    "reasoning kept without tools": _dropped_thinking,
    "header asked for or refused": _own_generation_prompt,
    "images in reminders": _text_reminders,
    "tools without parameters": _whole_tools,
}
# Where the peer departs from the official encoder, which ours follows.
DIFFERENCES = {
    "reminder after a question: the header comes first": _no_reminder_after_question,
    "answer or end without a question before it: no header": _questions_before_answers,
    "several reminders in a row: all of them stay": _one_reminder_at_a_time,
    "calls of one id: results take the place of the last": _distinct_calls,
    "integers beyond 64 bits in arguments: every digit stays": _short_integers,
    "infinity in arguments: Python's JSON has it": _finite_numbers,
}
