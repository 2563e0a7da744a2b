"""Bodies of answers. A field that was not asked for is left unset, and so out of the JSON."""

from typing import Literal

from pydantic import BaseModel

Finish = Literal["stop", "length", "tool_calls"]


class Usage(BaseModel):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class PromptToken(BaseModel):
    """A token that may stand at a place of the prompt, as in vLLM."""

    logprob: float
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion, one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """One choice, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(BaseModel):
    """Answer of ``/v1/completions``, or a piece of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Alternative(BaseModel):
    """A token that was likely."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Alternative):
    """The token that was taken, and those that were likely."""

    top_logprobs: list[Alternative]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a message, one entry per token."""

    content: list[ChatLogprob]
    refusal: None = None


class CallFunction(BaseModel):
    """What a call calls; ``arguments`` is JSON, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CallFunction


class FunctionPiece(BaseModel):
    """A piece of a call's function."""

    name: str | None = None
    arguments: str


class CallPiece(BaseModel):
    """A piece of a call; the first one of each call tells its id and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionPiece


class ChatMessage(BaseModel):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: None = None


class ChatDelta(BaseModel):
    """A piece of what the assistant says."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallPiece] | None = None


class ChatChoice(BaseModel):
    """One choice."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    token_ids: list[int] | None = None


class ChatPiece(BaseModel):
    """A piece of a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """Answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """A piece of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatPiece]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class Model(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(BaseModel):
    """Answer of ``/v1/models``."""

    object: Literal["list"]
    data: list[Model]


class ErrorDetails(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every refusal and failure."""

    error: ErrorDetails
