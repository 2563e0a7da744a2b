"""From the body of a request to the plan of what the engine is asked."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from openv41.engine.constraint import Constraint
from openv41.engine.request import Request
from openv41.engine.sampler import SamplingConfig
from openv41.io.image_processor import ProcessedImage
from openv41.io.prompt_ids import prompt_ids
from openv41.prompt import Section
from openv41.server.backend import ServedModel
from openv41.server.conversation import read_chat, read_transcript
from openv41.server.errors import ApiError
from openv41.server.image_loader import ImageLoader
from openv41.server.limits import Limits
from openv41.server.schemas import ChatBody, CompletionBody, Sampling

DEFAULT_TOKENS = 16  # of a completion, as in OpenAI's API; a chat goes on until it ends
SEEDS = 1 << 63
MAX_DIGITS = 9  # of a token id: longer ones are in no vocabulary, and slow to read


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A prompt as the engine reads it; ``text`` is what ``echo`` repeats."""

    tokens: tuple[int, ...]
    text: str = ""
    num_added: int = 0  # tokens at the start that no text stands for
    images: tuple[ProcessedImage, ...] = ()
    section: Section | None = None  # where an answer in the prompt format starts
    constraint: Constraint | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One HTTP request: each prompt ``n`` times, in the order of the choices."""

    prompts: tuple[EncodedPrompt, ...]
    n: int
    requests: tuple[Request, ...]

    def prompt_of(self, index: int) -> EncodedPrompt:
        """EncodedPrompt of a choice."""
        return self.prompts[index // self.n]


def num_choices(body: Sampling) -> int:
    """Sequences that a body asks for."""
    prompts = len(body.prompts) if isinstance(body, CompletionBody) else 1
    return prompts * body.num_choices


def check_body(body: Sampling, model: ServedModel, limits: Limits) -> None:
    """Refuse what needs no tokenizer to be seen."""
    if body.model is not None and body.model != model.name:
        raise ApiError(
            404,
            f"this server has no model {body.model!r}; it serves {model.name!r}",
            code="model_not_found",
            param="model",
        )
    if (count := num_choices(body)) > limits.max_choices:
        raise ApiError(
            400,
            f"prompts times n is {count}, must be at most {limits.max_choices}",
            code="too_many_choices",
            param="n",
        )
    if isinstance(body, ChatBody) and (count := len(body.messages)) > limits.max_messages:
        text = f"the chat has {count} messages, must be at most {limits.max_messages}"
        raise ApiError(400, text, code="too_many_messages", param="messages")


async def make_plan(
    body: Sampling, model: ServedModel, limits: Limits, loader: ImageLoader
) -> Plan:
    """Tokenize the prompts beside the event loop and set up one request per choice."""
    if isinstance(body, CompletionBody):
        prompts = await asyncio.to_thread(_completion_prompts, body, model)
    else:
        assert isinstance(body, ChatBody), f"no plan for {type(body).__name__}"
        prompts = (await _chat_prompt(body, model, limits, loader),)
    requests = await asyncio.to_thread(_requests, body, prompts, model, limits)
    return Plan(prompts=prompts, n=body.num_choices, requests=requests)


def _requests(
    body: Sampling, prompts: Sequence[EncodedPrompt], model: ServedModel, limits: Limits
) -> tuple[Request, ...]:
    """Requests of all choices; those of one prompt differ in their seeds alone."""
    sampling, requests = _sampling(body, model), []
    for prompt in prompts:
        _check_length(body, len(prompt.tokens), model, limits)
        count = _max_tokens(body, len(prompt.tokens), model, limits)
        request = _request(body, prompt, count, sampling, model)
        seed = secrets.randbelow(SEEDS) if body.seed is None else body.seed
        requests += [
            replace(request, sampling=replace(sampling, seed=(seed + i) % SEEDS))
            for i in range(body.num_choices)
        ]
    return tuple(requests)


def _completion_prompts(body: CompletionBody, model: ServedModel) -> tuple[EncodedPrompt, ...]:
    start = () if body.add_special_tokens is False else (model.bos_id,)
    texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
    encoded = iter(model.tokenizer.encode_batch(texts))
    prompts = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            tokens = (*start, *next(encoded))
            prompts.append(EncodedPrompt(tokens=tokens, text=prompt, num_added=len(start)))
        else:
            _check_tokens(prompt, model, "prompt")
            text = model.tokenizer.decode(prompt) if body.echo else ""
            prompts.append(EncodedPrompt(tokens=prompt, text=text))
    return tuple(prompts)


async def _chat_prompt(
    body: ChatBody, model: ServedModel, limits: Limits, loader: ImageLoader
) -> EncodedPrompt:
    if body.add_special_tokens:  # the template has written BOS already
        raise ApiError(
            400,
            "add_special_tokens cannot be used with chat: the template writes BOS itself",
            code="invalid_value",
            param="add_special_tokens",
        )
    if not model.has_format:
        tokens, constraint = await asyncio.to_thread(read_transcript, body, model)
        return EncodedPrompt(tokens=tokens, constraint=constraint)
    chat = await asyncio.to_thread(read_chat, body, model)
    images: tuple[ProcessedImage, ...] = ()
    if chat.images:
        if model.vision is None:
            text = f"{chat.images[0].name}: this model sees no images"
            raise ApiError(400, text, code="invalid_value", param="messages")
        if (count := len(chat.images)) > limits.max_images:
            text = f"the chat has {count} images, must be at most {limits.max_images}"
            raise ApiError(400, text, code="too_many_images", param="messages")
        images = await loader.load(chat.images, model.vision)
    tokens = await asyncio.to_thread(
        prompt_ids, chat.prompt, model.tokenizer, images, image_token_id=model.image_token_id
    )
    return EncodedPrompt(
        tokens=tokens,
        images=images,
        section=chat.prompt.section or "content",
        constraint=chat.constraint,
    )


def _check_tokens(tokens: Sequence[int], model: ServedModel, param: str) -> None:
    if bad := [token for token in set(tokens) if not model.is_token(token)]:
        size = model.tokenizer.vocab_size
        text = f"token id {min(bad)} is outside the vocabulary of {size}"
        raise ApiError(400, text, code="invalid_value", param=param)


def _check_length(body: Sampling, length: int, model: ServedModel, limits: Limits) -> None:
    """Refuse an empty prompt, and one that is too long or leaves no room for an answer."""
    if not length:
        text = "the prompt holds no token; give a text, or leave add_special_tokens on"
        raise ApiError(400, text, code="invalid_value", param="prompt")
    most = min(limits.max_prompt_tokens or model.max_length, model.max_length - 1)
    if length > most:
        text = f"the prompt has {length} tokens, must be at most {most}"
        raise ApiError(400, text, code="context_length_exceeded", param=_prompt_field(body))


def _max_tokens(body: Sampling, length: int, model: ServedModel, limits: Limits) -> int:
    """Tokens to add: what was asked for where it fits, else a refusal; by default what fits."""
    room = model.max_length - length
    asked = body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        asked = body.max_completion_tokens
    most = limits.max_output_tokens or model.max_length
    if asked is None:
        default = DEFAULT_TOKENS if isinstance(body, CompletionBody) else room
        return min(default, room, most)
    if asked > most:
        text = f"max_tokens is {asked}, must be at most {most}"
        raise ApiError(400, text, code="invalid_value", param="max_tokens")
    if asked > room:
        text = (
            f"the prompt has {length} tokens and max_tokens is {asked}; together at most "
            f"{model.max_length} fit"
        )
        raise ApiError(400, text, code="context_length_exceeded", param=_prompt_field(body))
    return asked


def _prompt_field(body: Sampling) -> str:
    return "messages" if isinstance(body, ChatBody) else "prompt"


def _request(
    body: Sampling,
    prompt: EncodedPrompt,
    max_tokens: int,
    sampling: SamplingConfig,
    model: ServedModel,
) -> Request:
    stop_ids = tuple(body.stop_token_ids or ())
    _check_tokens(stop_ids, model, "stop_token_ids")
    prompt_logprobs = body.prompt_logprobs
    if isinstance(body, CompletionBody):
        logprobs = body.logprobs
        if body.echo and logprobs is not None:
            prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    else:
        assert isinstance(body, ChatBody), f"no request for {type(body).__name__}"
        logprobs = body.top_logprobs or 0 if body.logprobs else None
    return Request(
        prompt=prompt.tokens,
        max_tokens=max_tokens,
        images=prompt.images,
        constraint=prompt.constraint,
        sampling=sampling,
        stop=body.stops,
        stop_ids=stop_ids,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _sampling(body: Sampling, model: ServedModel) -> SamplingConfig:
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
    }
    return SamplingConfig(
        seed=0,  # each choice has its own
        top_k=body.top_k if body.top_k and body.top_k > 0 else None,  # 0 and -1: all, as in vLLM
        logit_bias=_bias(body.logit_bias or {}, model),
        **{name: value for name, value in given.items() if value is not None},
    )


def _bias(given: dict[str, float], model: ServedModel) -> tuple[tuple[int, float], ...]:
    pairs = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= MAX_DIGITS):
            text = f"{key!a} is no token id"
            raise ApiError(400, text, code="invalid_value", param="logit_bias")
        pairs[int(key)] = value
    _check_tokens(tuple(pairs), model, "logit_bias")
    return tuple(pairs.items())
