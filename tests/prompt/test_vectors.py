"""The prompt vectors: text, places of special tokens, token ids."""

import pytest

from openv41.prompt import encode, from_request
from tests.prompt.format import ASSISTANT, EFFORT, EOS, REMINDER, USER, D

AGREED = [
    "user_thinking_default",
    "user_chat",
    "system_chat",
    "system_thinking_high",
    "system_thinking_max",
    "multi_turn_drop_thinking",
    "multi_turn_chat",
    "mid_system_then_user",
    "tools_keep_thinking_sorted_results",
    "tools_required_chat",
    "json_object_chat",
    "images_interleaved",
    "prefix_chat",
    "latest_reminder",
    "special_text_is_plain",
    "zh_mixed",
    "three_tools_thinking_no_system",
    "arguments_value_types",
    "arguments_not_object",
    "tools_and_json_object_chat",
    "json_schema_thinking_low_no_system",
    "tool_loop_without_tools_drops",
    "tools_keep_empty_reasoning_late_system",
    "prefix_thinking_content",
    "tool_choice_named_chat",
    "latest_reminder_before_system_and_user",
    "system_before_assistant_and_last",
    "user_text_between_results",
    "special_text_in_tools_is_plain",
    "tool_result_lists_and_images",
]
# Where the recipe departs from the official encoder: (text of the recipe, official text).
DEPARTURES = {
    "tool_keys_normalised": (
        '{"name": "odd", "description": "d", "parameters": {"properties": {"b": {"type": "string"},'
        ' "a": {"type": "string"}}, "type": "object"}}\n{"name": "bare", "description": "", '
        '"parameters": {}}',
        '{"strict": false, "parameters": {"properties": {"b": {"type": "string"}, "a": {"type": '
        '"string"}}, "type": "object"}, "description": "d", "name": "odd"}\n{"name": "bare"}',
    ),
    "arguments_double_encoded": (
        f'<{D} parameter name="arguments" string="true">'
        rf'"{{\"city\": \"P\", \"n\": {{\"k\": 1.0}}}}"</{D} parameter>',
        f'<{D} parameter name="city" string="true">P</{D} parameter>\n'
        f'<{D} parameter name="n" string="false">{{"k": 1.0}}</{D} parameter>',
    ),
    "latest_reminder_last": (
        f"{REMINDER}L{ASSISTANT}<think>",
        f"{ASSISTANT}<think>{REMINDER}L",
    ),
    "assistants_consecutive_and_last": (
        f"{ASSISTANT}</think>A1{EOS}{ASSISTANT}</think>A2{EOS}{ASSISTANT}<think>",
        f"{ASSISTANT}<think>R1</think>A1{EOS}R2</think>A2{EOS}",
    ),
}


@pytest.mark.golden
def test_every_vector_is_tested(vectors):
    assert set(vectors) == {*AGREED, *DEPARTURES}
    assert {name for name, case in vectors.items() if case.get("recipe_only")} == set(DEPARTURES)


@pytest.mark.golden
@pytest.mark.parametrize("name", AGREED)
def test_text_and_special_ranges(vectors, name):
    case = vectors[name]
    prompt = encode(from_request(case["request"]))
    assert prompt.text == case["prompt"]
    assert [list(pair) for pair in prompt.special_ranges] == case["special_ranges"]


@pytest.mark.parametrize("name", AGREED)
def test_token_ids(vectors, released_tokenizer, name):
    prompt = encode(from_request(vectors[name]["request"]))
    assert prompt.token_ids(released_tokenizer) == vectors[name]["token_ids"]


@pytest.mark.golden
@pytest.mark.parametrize("name", DEPARTURES)
def test_official_rules_where_the_recipe_departs(vectors, name):
    recipe, official = DEPARTURES[name]
    case = vectors[name]
    assert case["prompt"].count(recipe) == 1
    assert encode(from_request(case["request"])).text == case["prompt"].replace(recipe, official)


@pytest.mark.golden
def test_official_reminder_and_assistants_in_full(vectors):
    reminder = encode(from_request(vectors["latest_reminder_last"]["request"]))
    assert reminder.text.endswith(f"{EFFORT.format(75)}{USER}U{ASSISTANT}<think>{REMINDER}L")
    assert reminder.section == "reasoning"
    assistants = encode(from_request(vectors["assistants_consecutive_and_last"]["request"]))
    assert assistants.text.endswith(f"{USER}U{ASSISTANT}<think>R1</think>A1{EOS}R2</think>A2{EOS}")
    assert assistants.section is None


@pytest.mark.golden
def test_images_are_told_in_the_order_of_the_prompt(vectors):
    prompt = encode(from_request(vectors["tool_result_lists_and_images"]["request"]))
    assert [image.source for image in prompt.images] == [f"http://x/{n}.png" for n in (1, 2, 3)]
