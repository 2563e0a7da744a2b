"""deepseek-recipe: prompts of conversations, token counts of images."""

from importlib.metadata import version

import deepseek_recipe as recipe

from tests.peers.prompt_agreement import image_token_line, prompt_line
from tests.prompt.format import IMAGE

NAME = "deepseek-recipe"
VERSION = version(NAME)
SPELLING = "\ue000picture\ue000"  # of placeholders while rendering: no text spells it
SOURCE = recipe.UrlImageSource("https://example.org/picture")
ENCODING = recipe.DeepseekV41Encoding().with_special_tokens(recipe.SpecialTokens(image=SPELLING))


def lines():
    """Yield the comparison of prompts and that of image token counts."""
    about = {"peer": NAME, "version": VERSION}
    yield about | prompt_line(render)
    yield about | image_token_line(image_tokens)


def render(request):
    """Return text and special ranges of a prompt.

    Built from the classes below the request layer, which refuses results that no call precedes.
    """
    chat = recipe.Conversation(
        [_message(entry) for entry in request["messages"]],
        thinking_mode=request["thinking"]["type"] == "enabled",
        tools=[_tool(tool["function"]) for tool in request["tools"]],
        reasoning_effort=request["reasoning_effort"],
        response_format=(request["response_format"] or {"type": "text"})["type"],
    )
    found = ENCODING.render_conversation(chat)
    return _respelled(found.prompt, found.special_ranges)


def image_tokens(width, height):
    """Return the length of an image's span."""
    images = recipe.MultiModalData([recipe.ImageInfo(b"", width, height)])
    return images.image_token_adjustment() + 1


def _message(entry):
    role, blocks = entry["role"], entry["content"]
    if isinstance(blocks, str):
        blocks = [{"type": "text", "text": blocks}]
    content = "\n\n".join(block.get("text", SPELLING) for block in blocks)
    images = [SOURCE for block in blocks if block["type"] == "image"]
    if role == "assistant":
        calls = [_call(call) for call in entry["tool_calls"]]
        return recipe.AssistantMessage(content, entry["reasoning_content"], calls)
    if role == "latest_reminder":
        return recipe.LatestReminderMessage(content)
    if role == "tool":
        call_id = entry["tool_call_id"]
        return recipe.ToolMessage(content, call_id, images, image_token=SPELLING)
    kind = {"system": recipe.SystemMessage, "user": recipe.UserMessage}[role]
    return kind(content, images, image_token=SPELLING)


def _call(call):
    function = call["function"]
    name = "::".join(filter(None, (call["namespace"], function["name"])))
    return recipe.ToolCall(call["id"], name, function["arguments"])


def _tool(function):
    return recipe.ToolDefinition(function["name"], function["description"], function["parameters"])


def _respelled(prompt, ranges):
    """Give placeholders the spelling of the released tokenizer."""
    text, moved, end = "", [], 0
    for first, last in ranges:
        text += prompt[end:first]
        special = prompt[first:last].replace(SPELLING, IMAGE)
        moved.append((len(text), len(text) + len(special)))
        text, end = text + special, last
    return text + prompt[end:], tuple(moved)
