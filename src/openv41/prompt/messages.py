"""Conversations: messages with text, images, reasoning and tool calls, and their settings."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from openv41.errors import PromptError
from openv41.prompt.dsml import (
    Parameter,
    check_names,
    dump_json,
    join_name,
    split_name,
    to_parameters,
)
from openv41.prompt.tokens import TASKS, check_unicode

ROLES = ("system", "user", "assistant", "tool", "latest_reminder")
EFFORTS = {"low": 50, "high": 75, "max": 100}  # as in the released encoder
CHOICES = ("auto", "none", "required")
JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Image:
    """A picture inside a message; ``source`` is whatever the image processor is to read."""

    source: object


Part = str | Image


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; ``arguments`` is JSON text, as the API has it, or an object.

    A name ``namespace::name`` is split. ``parameters`` are the arguments as they stand in the
    prompt: the parser keeps what the model wrote, so that encoding gives the same bytes again.
    """

    name: str
    arguments: str | JsonObject = "{}"
    _: KW_ONLY
    id: str = ""
    namespace: str = ""
    parameters: tuple[Parameter, ...] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.name or "::" in self.namespace:
            raise PromptError(
                f"tool call {self.name!a} in namespace {self.namespace!a}: it needs a name, "
                "and a namespace without '::'"
            )
        if not self.namespace:
            namespace, name = split_name(self.name)
            object.__setattr__(self, "namespace", namespace)
            object.__setattr__(self, "name", name)
        if self.parameters is None:
            parameters = to_parameters(self.arguments, f"arguments of {self.name!a}")
            object.__setattr__(self, "parameters", parameters)
        check_names(self.full_name, [parameter.name for parameter in self.parameters or ()])
        for parameter in self.parameters or ():
            for text in (parameter.name, parameter.value):
                check_unicode(text, f"an argument of {self.name!a}")

    @property
    def full_name(self) -> str:
        """Name as it stands in the prompt."""
        return join_name(self.namespace, self.name)


@dataclass(frozen=True, slots=True)
class Message:
    """One message; text in it is always plain text, whatever special tokens it spells.

    Args:
        role: Who speaks: system, user, assistant, tool (a result) or latest_reminder.
        content: Text, or texts and images in order, which a blank line separates.
        reasoning: Thoughts before an assistant's content.
        tool_calls: What an assistant calls.
        tool_call_id: The call that a tool's result belongs to.
        tools: Tools declared by a system message, as in ``Conversation``.
        task: Quick task whose token follows the message.
        wo_eos: An assistant's message without the token that ends it.
        prefix: The last message, begun for the assistant, who continues it: no end token, and
            reasoning without content stays open.
    """

    role: str
    content: str | Sequence[Part] = ""
    _: KW_ONLY
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    tools: Sequence[JsonObject] = ()
    task: str | None = None
    wo_eos: bool = False
    prefix: bool = False

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise PromptError(f"role is {self.role!a}, must be one of {', '.join(ROLES)}")
        object.__setattr__(self, "content", _checked_content(self.content, self.role))
        check_unicode(self.reasoning, "reasoning")
        for name in ("tool_calls", "tools"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_fields()

    def _check_fields(self) -> None:
        owners = {
            "reasoning": "assistant",
            "tool_calls": "assistant",
            "tool_call_id": "tool",
            "tools": "system",
            "wo_eos": "assistant",
            "prefix": "assistant",
        }
        for name, owner in owners.items():
            if getattr(self, name) and self.role != owner:
                raise PromptError(f"a {self.role} message has {name}, only {owner} messages may")
        for tool in self.tools:
            check_tool(tool)
        if self.task is not None and self.task not in TASKS:
            raise PromptError(f"task is {self.task!a}, must be one of {', '.join(TASKS)}")
        if self.task and (self.role == "latest_reminder" or self.wo_eos or self.prefix):
            raise PromptError(f"task {self.task!a} must follow a finished message")
        if self.prefix and self.tool_calls:
            raise PromptError("a prefix has tool calls, nothing can continue after them")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and how the model is to answer them.

    Args:
        messages: At least one message.
        thinking: Whether the model reasons before it answers (thinking mode), else chat mode.
        effort: 1 to 100, or low (50), high (75), max (100); chat mode ignores it.
        drop_thinking: Leave out reasoning before the last user's turn, unless there are tools.
        tools: Function tools as in OpenAI's API, for the first system message.
        tool_choice: auto, none, required, or ``{"type": "function", "function": {"name": ...}}``.
            The last two begin the call in the prompt, so they need chat mode.
        response_format: Format as in OpenAI's API: text, json_object or json_schema.
        generation_prompt: End with the assistant's header: always, never, or as the format has it
            (None), which is after a user's turn and after a system message that is not the first.
            A prefix is continued in any case.
    """

    messages: Sequence[Message]
    _: KW_ONLY
    thinking: bool = True
    effort: int | str = "high"
    drop_thinking: bool = True
    tools: Sequence[JsonObject] = ()
    tool_choice: str | JsonObject = "auto"
    response_format: JsonObject | None = None
    generation_prompt: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", tuple(self.messages))
        object.__setattr__(self, "tools", tuple(self.tools))
        if not self.messages:
            raise PromptError("the conversation has no messages, it needs at least one")
        for place, message in enumerate(self.messages[:-1]):
            if message.prefix:
                text = f"messages[{place}] is a prefix, only the last message may be"
                raise PromptError(text, param="messages")
            following = self.messages[place + 1].role
            if message.task and following not in ("assistant", "latest_reminder"):
                raise PromptError(
                    f"messages[{place}] has task {message.task!a} and a {following} message after "
                    "it; an assistant's message must follow, or none",
                    param="messages",
                )
        for tool in self.tools:
            check_tool(tool)
        if self.tools and self.messages[0].tools:
            raise PromptError("tools are declared by the conversation and by its first message")
        effort_number(self.effort)
        self._check_choice()
        schema_of(self.response_format)

    def _check_choice(self) -> None:
        choice = self.tool_choice
        if choice in ("auto", "none"):
            return
        names = [tool_name(tool) for tool in self.tools]
        if choice != "required" and self.chosen_tool not in names:
            raise PromptError(
                f"tool_choice is {choice!a}, must be one of {', '.join(CHOICES)}, or name a tool "
                f"as {{'type': 'function', 'function': {{'name': ...}}}}; tools: {names!a}"
            )
        if not names:
            raise PromptError(f"tool_choice is {choice!a} and there are no tools to call")
        if self.thinking:
            raise PromptError(
                f"tool_choice is {choice!a} in thinking mode, where reasoning comes first; "
                "use chat mode, or leave it at auto"
            )

    @property
    def chosen_tool(self) -> str:
        """Name of the one tool that must be called, or nothing."""
        choice = self.tool_choice
        if isinstance(choice, str) or choice.get("type") != "function":
            return ""
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        return name if isinstance(name, str) else ""

    @property
    def offered_tools(self) -> tuple[JsonObject, ...]:
        """Tools of the conversation that its tool choice leaves."""
        if self.tool_choice == "none":
            return ()
        chosen = self.chosen_tool
        return tuple(tool for tool in self.tools if not chosen or tool_name(tool) == chosen)


def effort_number(effort: object) -> int:
    """Reasoning effort as a number from 1 to 100."""
    number = EFFORTS.get(effort) if isinstance(effort, str) else effort
    if type(number) is not int or not 1 <= number <= 100:
        raise PromptError(
            f"effort is {effort!a}, must be an integer from 1 to 100 or one of {', '.join(EFFORTS)}"
        )
    return number


def schema_of(response_format: JsonObject | None) -> JsonObject | None:
    """What the prompt says about the format of the answer, if anything."""
    if response_format is None or response_format.get("type") == "text":
        return None
    if response_format.get("type") == "json_object":
        return {"type": "json_object"}
    inner = response_format.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if response_format.get("type") != "json_schema" or not isinstance(schema, Mapping):
        raise PromptError(
            f"response_format is {response_format!a}, must have type text, json_object, or "
            "json_schema with an object json_schema.schema"
        )
    dump_json(schema, "response_format")
    return schema


def describe_tool(tool: JsonObject) -> JsonObject:
    """Object that stands for a tool in the prompt: its function, named with its namespace."""
    function = dict(tool["function"])
    inside = function.pop("namespace", None)
    function["name"] = join_name(tool.get("namespace") or inside or "", function["name"])
    return function


def tool_name(tool: JsonObject) -> str:
    """Name that calls of the tool have."""
    name: str = describe_tool(tool)["name"]
    return name


def check_tool(tool: JsonObject) -> None:
    """Refuse what is not a function tool."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise PromptError(
            f"tool is {tool!a}, must be {{'type': 'function', 'function': {{'name': ...}}}}"
        )
    if tool.get("type", "function") != "function":
        raise PromptError(f"tool {name!a} has type {tool['type']!a}, must be function")
    for namespace in (tool.get("namespace"), function.get("namespace")):
        if namespace is not None and (not isinstance(namespace, str) or "::" in namespace):
            raise PromptError(f"tool {name!a} has namespace {namespace!a}, must be a plain name")
    dump_json(function, f"tool {name!a}")


def _checked_content(content: object, role: str) -> str | tuple[Part, ...]:
    where = f"content of a {role} message"
    if isinstance(content, str):
        check_unicode(content, where)
        return content
    if not isinstance(content, Sequence):
        raise PromptError(f"{where} is {content!a}, must be text or a list of texts and images")
    for part in content:
        if isinstance(part, str):
            check_unicode(part, where)
        elif not isinstance(part, Image):
            raise PromptError(f"{where} holds {part!a}, must be texts and images")
    return tuple(content)
