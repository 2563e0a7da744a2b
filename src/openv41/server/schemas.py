"""Bodies of requests: OpenAI's fields, and those of vLLM that training and evaluation need.

Types are strict, null means "not given", unknown fields are refused by name. Fields of OpenAI that
change nothing here are accepted and ignored; fields that would change the answer and cannot be
honoured are accepted with their neutral value only (``NEUTRAL``).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    model_validator,
)

from openv41.engine.request import MAX_STOP


def _check_unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"holds a lone surrogate at character {error.start}") from None
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]
StopText = Annotated[
    str, Field(min_length=1, max_length=MAX_STOP)
]  # a bounded string is checked anyway
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Ignored = Annotated[JsonValue, Field(description="Accepted and ignored.")]


class NeutralField:
    """Marks a field that takes its neutral value only."""


Neutral = Annotated[
    JsonValue, NeutralField(), Field(description="Accepted with its neutral value only.")
]


def _kind_of_prompt(value: object) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    if isinstance(first, str):
        return "texts"
    return "token_lists" if isinstance(first, list) else "tokens"


def _kind_of_text(value: object) -> str | None:
    if isinstance(value, str):
        return "text"
    return "list" if isinstance(value, list) else None


PromptField = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Annotated[list[Text], Field(min_length=1)], Tag("texts")]
    | Annotated[TokenIds, Tag("tokens")]
    | Annotated[Annotated[list[TokenIds], Field(min_length=1)], Tag("token_lists")],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt_type",
        custom_error_message="must be a text, texts, token ids, or lists of token ids",
    ),
]
Stop = Annotated[
    Annotated[StopText, Tag("text")]
    | Annotated[Annotated[list[StopText], Field(max_length=16)], Tag("list")],
    Discriminator(
        _kind_of_text,
        custom_error_type="stop_type",
        custom_error_message="must be a text or a list of texts",
    ),
]

# Neutral values of fields that cannot be honoured, and why.
NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "suffix": ((None, ""), "insertion before a suffix is not supported"),
    "min_tokens": ((None, 0), "use ignore_eos with max_tokens"),
    "include_stop_str_in_output": ((None, False), "stop strings are always left out"),
    "truncate_prompt_tokens": ((None,), "shorten the prompt"),
    "functions": ((None, []), "use tools"),
    "function_call": ((None, "none", "auto"), "use tool_choice"),
    "file_id": ((None,), "files are not stored; send file_data"),
    "annotations": ((None, []), "annotations are not supported"),
    "refusal": ((None,), "refusals are not supported"),
    "audio": ((None,), "audio is not supported"),
    "modalities": ((None, ["text"]), "only text is supported"),
    "prediction": ((None,), "predicted outputs are not supported"),
    "web_search_options": ((None,), "web search is not supported"),
    "response_format": ((None, {"type": "text"}), "only chats have formats"),
    "chat_template": ((None,), "the server's own template is used"),
}


class Body(BaseModel):
    """Strict types; a neutral field with another value is refused with its reason."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: object) -> object:
        if isinstance(data, Mapping):
            for name, (allowed, reason) in NEUTRAL.items():
                if name in data and cls._is_neutral(name) and data[name] not in allowed:
                    raise ValueError(f"{name} cannot be used here: {reason}")
        return data

    @classmethod
    def _is_neutral(cls, name: str) -> bool:
        field = cls.model_fields.get(name)
        return field is not None and any(isinstance(m, NeutralField) for m in field.metadata)


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class Sampling(Body):
    """What completions and chat have in common."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | None = None
    seed: int | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=4096)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # As in vLLM.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: Ignored = None
    spaces_between_special_tokens: Ignored = None
    # Change nothing here.
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    # Accepted where they ask for nothing.
    min_tokens: Neutral = None
    include_stop_str_in_output: Neutral = None
    truncate_prompt_tokens: Neutral = None

    @model_validator(mode="after")
    def _check_stream(self) -> "Sampling":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs cannot be streamed; set stream to false")
        return self

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionBody(Sampling):
    """Body of ``/v1/completions``."""

    prompt: PromptField
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: Neutral = None
    response_format: Neutral = None

    @model_validator(mode="after")
    def _check_best_of(self) -> "CompletionBody":
        if self.best_of not in (None, self.num_choices):
            raise ValueError("best_of must equal n: no choice is thrown away")
        return self

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """Each prompt on its own."""
        prompt: Any = self.prompt  # its discriminator has told the kinds apart
        if isinstance(prompt, str):
            return (prompt,)
        if isinstance(prompt[0], int):
            return (tuple(prompt),)
        return tuple(p if isinstance(p, str) else tuple(p) for p in prompt)


class TextPart(Body):
    """A piece of text."""

    type: Literal["text"]
    text: Text


class ImageUrl(Body):
    """Where an image is: in a data URL, or on the web."""

    url: Text
    detail: Ignored = None


class ImagePart(Body):
    """An image."""

    type: Literal["image_url"]
    image_url: ImageUrl


class FileData(Body):
    """Bytes of a file, as base64 or as a data URL."""

    file_data: Text
    filename: Text | None = None
    file_id: Neutral = None


class FilePart(Body):
    """An image as a file."""

    type: Literal["file"]
    file: FileData


Part = Annotated[TextPart | ImagePart | FilePart, Field(discriminator="type")]
Content = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[Part], Tag("list")],
    Discriminator(
        _kind_of_text,
        custom_error_type="content_type",
        custom_error_message="must be a text or a list of parts",
    ),
]


class Function(Body):
    """What a call calls; ``arguments`` is JSON."""

    name: Text
    arguments: Text


class Call(Body):
    """A call that an assistant made."""

    id: Text | None = None
    type: Literal["function"] | None = None
    function: Function
    index: Ignored = None


class Message(Body):
    """A message of a chat; what an answer of this server holds may be sent back as it is."""

    role: Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
    content: Content | None = None
    reasoning_content: Text | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: Text | None = None
    prefix: bool | None = None
    task: Text | None = None
    name: Ignored = None
    function_call: Neutral = None
    annotations: Neutral = None
    refusal: Neutral = None
    audio: Neutral = None

    @model_validator(mode="after")
    def _check_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message needs content")
        return self


class Thinking(Body):
    """Whether the model reasons before it answers, as DeepSeek's API has it."""

    type: Literal["enabled", "disabled"]


class TemplateOptions(Body):
    """The same and more, as clients of vLLM send it."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: JsonValue = None
    drop_thinking: bool | None = None


class ChatBody(Sampling):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, JsonValue]] | None = None
    tool_choice: Text | dict[str, JsonValue] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, JsonValue] | None = None
    reasoning_effort: JsonValue = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    verbosity: Ignored = None
    functions: Neutral = None
    function_call: Neutral = None
    audio: Neutral = None
    modalities: Neutral = None
    prediction: Neutral = None
    web_search_options: Neutral = None
    chat_template: Neutral = None

    @model_validator(mode="after")
    def _check_options(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("add_generation_prompt and continue_final_message exclude each other")
        return self


FIELDS = tuple({**CompletionBody.model_fields, **ChatBody.model_fields})
