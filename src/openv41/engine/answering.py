"""From logits to events, and from events to an answer."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from openv41.config import ModelConfig
from openv41.engine.job import Job
from openv41.engine.logprobs import logprobs, row_logprobs
from openv41.engine.request import Answer, Event, FinishReason


def take(
    job: Job, token: int, logits: Float[Tensor, "rows V"], row: int, config: ModelConfig
) -> tuple[Event, FinishReason | None]:
    """Add a token to a job's answer; say why it is the last, if it is.

    It was drawn from that row of ``logits``.
    """
    request = job.request
    known: dict[str, Any] = _about_prompt(job) if not job.num_output else {}
    is_end = token == config.eos_token_id and not request.ignore_eos
    if is_end or token in request.stop_ids:
        return Event(text=job.text.finish(), **known), FinishReason.STOP
    if request.logprobs is not None:
        own, top = logprobs(logits[row], token, request.logprobs)
        known |= {"logprob": own, "top": top}
    job.tokens.append(token)
    text, reason = job.text.push(token), None
    if job.text.matched is not None:
        reason = FinishReason.STOP
    elif job.num_output == request.max_tokens or len(job.tokens) > config.max_position:
        text, reason = text + job.text.finish(), FinishReason.LENGTH
    return Event(token=token, text=text, **known), reason


def take_prompt(job: Job, logits: Float[Tensor, "T V"]) -> None:
    """Keep the log-probabilities of the prompt tokens that follow the rows just computed."""
    asked = job.request.prompt_logprobs
    assert asked is not None, "no prompt log-probabilities were asked for"
    prompt = job.request.prompt
    begin = job.done - len(logits)
    following = prompt[begin + 1 : job.done + 1]
    if begin == 0:  # also where a preempted prompt starts anew
        job.prompt_logprobs, job.prompt_top = [None], [()]
    found = row_logprobs(logits[: len(following)], following, asked)
    for position, (own, top) in enumerate(found, begin + 1):
        is_image = job.images.covers(position)  # no word was predicted there
        job.prompt_logprobs.append(None if is_image else own)
        job.prompt_top.append(() if is_image else top)


def _about_prompt(job: Job) -> dict[str, Any]:
    assert job.cached_tokens is not None, "the request has not started"
    return {
        "cached_tokens": job.cached_tokens,
        "prompt_logprobs": tuple(job.prompt_logprobs),
        "prompt_top": tuple(job.prompt_top),
    }


class Collector:
    """A sink that puts the events of one request together."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        """Take the next event."""
        self.events.append(event)

    def answer(self) -> Answer:
        """The answer, once the last event has come."""
        first, last = self.events[0], self.events[-1]
        assert last.finish_reason is not None, "the request has not ended"
        drawn = [event for event in self.events if event.token is not None]
        return Answer(
            tokens=tuple(event.token for event in drawn if event.token is not None),
            text="".join(event.text for event in self.events),
            finish_reason=last.finish_reason,
            logprobs=tuple(event.logprob for event in drawn if event.logprob is not None),
            top=tuple(event.top for event in drawn if event.logprob is not None),
            prompt_logprobs=first.prompt_logprobs,
            prompt_top=first.prompt_top,
            cached_tokens=first.cached_tokens,
            choices=last.choices,
            error=last.error,
        )
