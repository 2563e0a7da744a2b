"""Conversations, answers and awkward text, generated."""

import json

from hypothesis import strategies as st

from openv41.prompt import from_request
from tests.prompt.format import ASSISTANT, BOS, EOS, IMAGE, REMINDER, SYSTEM, USER, D

FRAGMENTS = [
    *(ASSISTANT, BOS, EOS, IMAGE, REMINDER, SYSTEM, USER, D, "<think>", "</think>"),
    *(f"\n\n<{D} calls>\n", f"</{D} calls>", f"</{D} invoke>", f"</{D} parameter>"),
    *(f'<{D} invoke name="g">\n', f'<{D} parameter name="k" string="true">', "<tool_result>"),
    *("</tool_result>", "</", "<", ">", "\n", "\n\n", '"', '">', '" string="', "\\", "::", " "),
    *("</think", "\uff5cDSM", "\uff5c", "caf\u00e9", "\u4f60\u597d", "\U0001f642", "\0", "{", "a"),
]
awkward_text = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=6).map("".join)
plain_text = st.text(alphabet='ab<>/\n" \u4f60\U0001f642', max_size=12)
NO_ID = st.just("")
names = st.from_regex(r"[a-zA-Z0-9_.-]{1,12}", fullmatch=True)


def json_values(text):
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
        max_leaves=6,
    )


def tool_calls(text, ids=NO_ID):
    keys = text.filter(lambda key: '" string="true">' not in key and '" string="false">' not in key)
    arguments = st.dictionaries(keys, json_values(text), max_size=4)
    return st.builds(
        lambda name, found, namespace, call_id: {
            "id": call_id,
            "namespace": namespace,
            "function": {"name": name, "arguments": json.dumps(found, ensure_ascii=False)},
        },
        names,
        arguments,
        st.just("") | names,
        ids,
    )


def answers(text, *, thinking=True, ids=NO_ID):
    return st.fixed_dictionaries(
        {
            "role": st.just("assistant"),
            "content": text,
            "reasoning_content": text if thinking else st.just(""),
            "tool_calls": st.lists(tool_calls(text, ids), max_size=3),
        }
    )


def requests(text):
    """Requests with messages in any order; results name calls, or no call at all."""
    blocks = text.map(lambda found: {"type": "text", "text": found}) | st.integers().map(
        lambda number: {"type": "image", "image": number}
    )
    content = text | st.lists(blocks, max_size=3)
    ids = st.sampled_from(["a", "b", "c", ""])
    others = st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "latest_reminder"]), "content": content}
    )
    results = st.fixed_dictionaries(
        {"role": st.just("tool"), "content": content, "tool_call_id": ids}
    )
    tools = st.builds(
        lambda name, words: {"type": "function", "function": {"name": name, "description": words}},
        names,
        text,
    )
    return st.fixed_dictionaries(
        {
            "messages": st.lists(others | results | answers(text, ids=ids), min_size=1, max_size=6),
            "thinking": st.sampled_from([{"type": "enabled"}, {"type": "disabled"}]),
            "reasoning_effort": st.integers(1, 100),
            "drop_thinking": st.booleans(),
            "tools": st.lists(tools, max_size=2),
            "response_format": st.sampled_from([None, {"type": "json_object"}]),
            "add_generation_prompt": st.none() | st.booleans(),
        }
    )


def to_message(entry):
    """Message of an entry; built in tests, since the type checks of building draw at random."""
    return from_request({"messages": [entry]}).messages[0]
