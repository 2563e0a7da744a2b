"""An engine without a model: it says the prompt again, and misbehaves when the prompt asks."""

import asyncio
from types import SimpleNamespace

from openv41.engine.request import Event, FinishReason, TokenLogprob
from openv41.errors import OverloadedError
from openv41.io.tokenizer import train_tokenizer
from openv41.server.backend import ServedModel

BOS, EOS = 0, 1
MAX_LENGTH = 512
STEP = 0.02  # seconds per token of a slow answer


def make_model(folder):
    """Return a model whose tokens are bytes."""
    (folder / "text").write_text("abc")
    tokenizer = train_tokenizer([folder / "text"], vocab_size=259)
    return ServedModel(
        name="echo",
        tokenizer=tokenizer,
        bos_id=BOS,
        eos_id=EOS,
        max_length=MAX_LENGTH,
        created=1,
        num_tokens=tokenizer.vocab_size,
        vision=None,
        image_token_id=tokenizer.vocab_size,
    )


class FakeBackend:
    """Repeats the prompt, its BOS left out, then ends; a seed decides where an answer begins.

    Words in a prompt: ``!slow`` waits between tokens, ``!wait`` begins once ``released`` is set,
    ``!hang`` never goes on after one token, ``!raise`` and ``!error`` fail after two tokens,
    ``!fault`` as well, by the request's own doing, ``!full`` has no room.
    """

    def __init__(self, model):
        self.model = model
        self.x, self.y, self.z = model.tokenizer.encode("xyz")
        self.seen = []  # requests, in order
        self.running = 0
        self.cancelled = 0
        self.released = False
        self.is_started = self.is_stopped = False

    async def start(self):
        self.is_started = True

    async def stop(self, *, drain=True):
        self.is_stopped = True

    @property
    def is_running(self):
        return self.is_started and not self.is_stopped

    def stats(self):
        return SimpleNamespace(
            queued=0,
            running=self.running,
            pages_used=3,
            pages_free=5,
            pages_cached=2,
            prompt_tokens=sum(len(r.prompt) for r in self.seen),
            generated_tokens=11,
            prefix_hit_tokens=12,
            prefill_rows=13,
            prefill_rows_skipped=14,
            preemptions=15,
            images_encoded=20,
            image_hits=21,
            image_bytes=22,
            engram_rows=16,
            engram_hits=17,
            engram_bytes=18,
            engram_stalls=19,
            draft_steps=9,
            draft_budget=3,
            draft_rounds=23,
            drafts_verified=(23, 20),
            drafts_accepted=(12, 8),
            draft_acceptance=(0.5, 0.25),
            mean_accepted_length=2.5,
            wasted_rows=24,
        )

    async def stream(self, request):
        self.seen.append(request)
        self.running += 1
        try:
            async for event in self._answer(request):
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _answer(self, request):
        text = self.model.tokenizer.decode(request.prompt)
        if "!full" in text:
            raise OverloadedError("the engine's queue is full")
        while "!wait" in text and not self.released:
            await asyncio.sleep(STEP / 4)
        tokens = self._tokens(request)
        for place in range(request.max_tokens):
            await asyncio.sleep(STEP if "!slow" in text else 0)
            if "!hang" in text and place == 1:
                await asyncio.Event().wait()
            if "!raise" in text and place == 2:
                raise ValueError("a bug")
            if "!error" in text and place == 2:
                yield Event(finish_reason=FinishReason.ERROR, error="no page left")
                return
            if "!fault" in text and place == 2:
                yield Event(
                    finish_reason=FinishReason.ERROR, error="too complex", is_own_fault=True
                )
                return
            if place >= len(tokens) and not request.ignore_eos:
                yield Event(finish_reason=FinishReason.STOP)
                return
            event = self._event(request, tokens, place)
            yield event
            if event.finish_reason is not None:
                return

    def _tokens(self, request):
        tokens = [token for token in request.prompt if token > EOS] or [self.x]
        start = request.sampling.seed % len(tokens)
        return tokens[start:] + tokens[:start]

    def _event(self, request, tokens, place):
        token = tokens[place % len(tokens)]
        text = self.model.tokenizer.decode([token])
        finish = FinishReason.LENGTH if place + 1 == request.max_tokens else None
        if text in request.stop or token in request.stop_ids:
            text, finish = "", FinishReason.STOP
        first = {"cached_tokens": 1, **self._prompt(request)} if place == 0 else {}
        own, top = (
            (None, ()) if request.logprobs is None else self._logprobs(token, request.logprobs)
        )
        return Event(token=token, text=text, logprob=own, top=top, finish_reason=finish, **first)

    def _prompt(self, request):
        if request.prompt_logprobs is None:
            return {}
        pairs = [self._logprobs(t, request.prompt_logprobs) for t in request.prompt[1:]]
        return {
            "prompt_logprobs": (None, *(own for own, _ in pairs)),
            "prompt_top": ((), *(top for _, top in pairs)),
        }

    def _logprobs(self, token, count):
        likely = [(token, -0.5), (self.y, -1.5), (self.z, float("-inf"))]
        top = tuple(TokenLogprob(*pair) for pair in likely[:count])
        return TokenLogprob(token, -0.5), top
