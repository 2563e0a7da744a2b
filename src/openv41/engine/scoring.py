"""How likely texts are, and what the model adds to them: what evaluation harnesses ask for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from openv41.engine.engine import Engine
from openv41.engine.request import Answer, Request, refuse_failed
from openv41.engine.sampler import SamplingConfig
from openv41.errors import InputError

AT_ONCE = 64  # requests between two reports of progress
MAX_NEW_TOKENS = 256  # of a generation that does not say
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")
Progress = Callable[[int], None]  # gets the requests done since the last call
Asked = TypeVar("Asked")


class Scorer:
    """Scores and continues texts on an engine; every text starts with BOS.

    Texts that are too long for the model or for the engine's cache lose their beginning, but for
    BOS; what is scored or generated is never cut.
    """

    def __init__(self, engine: Engine, progress: Progress = lambda _: None) -> None:
        cache, model = engine.config.cache, engine.model.config
        self.engine, self._progress = engine, progress
        self.window = min(model.max_position, cache.num_pages * cache.page_size)  # tokens
        self._bos = model.bos_token_id
        self._never = model.image_token_id if model.vision is not None else None
        self._drawn = 0  # samples so far: each has a seed of its own

    def loglikelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Of each context and continuation: log-probability, and whether greedy decoding gives it.

        Raises InputError for a continuation that is empty or longer than the model reads.
        """
        requests, starts = [], []
        for context, continuation in pairs:
            before, scored = self._encode_pair(context, continuation)
            if not scored or len(scored) >= self.window:
                raise InputError(
                    f"a continuation has {len(scored)} tokens, must be from 1 to "
                    f"{self.window - 1}: {continuation[:40]!r}"
                )
            ids = self._cut([*before, *scored])
            starts.append(len(ids) - len(scored))
            requests.append(_scoring(ids))
        answers = self._run(requests)
        return [self._score(answer, start) for answer, start in zip(answers, starts, strict=True)]

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Log-probability of each whole text, every token once and with all that fits before it."""
        requests, starts, owners = [], [], []
        for number, text in enumerate(self.engine.tokenizer.encode_batch(texts)):
            ids = [self._bos, *text]
            for first, scored, stop in rolling_windows(len(ids), self.window):
                requests.append(_scoring(ids[first:stop]))
                starts.append(scored - first)
                owners.append(number)
        totals = [0.0] * len(texts)
        for answer, start, owner in zip(self._run(requests), starts, owners, strict=True):
            totals[owner] += self._score(answer, start)[0]
        return totals

    def generations(self, asked: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """What follows each context, up to a string of ``until``, EOS or ``max_gen_toks`` tokens.

        Greedy unless ``do_sample`` or a ``temperature`` says otherwise.
        """
        return [answer.text for answer in self._run([self._continuing(*one) for one in asked])]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both, cut where their common text is; spaces between them go to the second.

        Where a token would span the cut, each is encoded alone.
        """
        bare = context.rstrip()
        continuation, encode = context[len(bare) :] + continuation, self.engine.tokenizer.encode
        before, whole = encode(bare), encode(bare + continuation)
        if whole[: len(before)] == before and len(whole) > len(before):
            return before, whole[len(before) :]
        return before, encode(continuation)

    def _continuing(self, context: str, settings: Mapping[str, Any]) -> Request:
        known = ("until", "do_sample", *LENGTHS, *SAMPLING)
        if unknown := sorted(set(settings) - set(known)):
            raise InputError(
                f"generation settings {', '.join(unknown)} are unknown; there are "
                f"{', '.join(known)}"
            )
        until = settings.get("until") or ()
        stop = (until,) if isinstance(until, str) else tuple(text for text in until if text)
        lengths = [int(settings[name]) for name in LENGTHS if settings.get(name) is not None]
        most = min(lengths, default=MAX_NEW_TOKENS)
        if most >= self.window:
            raise InputError(
                f"max_gen_toks is {most}, must be below {self.window}, the tokens that there is "
                "room for"
            )
        ids = self._cut(self.engine.tokenizer.encode(context), self.window - most)
        return Request(prompt=ids, max_tokens=most, stop=stop, sampling=self._sampling(settings))

    def _sampling(self, settings: Mapping[str, Any]) -> SamplingConfig:
        """How to draw; each sample has another seed, so that repeats differ."""
        given = {key: settings[key] for key in SAMPLING if settings.get(key) is not None}
        samples = settings.get("do_sample")
        if samples is None:
            samples = given.get("temperature", 0) > 0
        if not samples or given.get("temperature") == 0:
            kept = {k: v for k, v in given.items() if k == "repetition_penalty"}
            return SamplingConfig(temperature=0.0, **kept)
        self._drawn += 1
        return SamplingConfig(seed=self._drawn - 1, **given)

    def _cut(self, ids: Sequence[int], most: int | None = None) -> tuple[int, ...]:
        """BOS and the last of these tokens, ``most`` together."""
        room = (self.window if most is None else most) - 1
        return (self._bos, *ids[max(0, len(ids) - room) :])

    def _run(self, requests: Sequence[Request]) -> list[Answer]:
        answers: list[Answer] = []
        for some in _parts(requests, AT_ONCE):
            found = self.engine.generate(some)
            refuse_failed(found, "a request of the evaluation")
            answers += found
            self._progress(len(some))
        return answers

    def _score(self, answer: Answer, start: int) -> tuple[float, bool]:
        """Log-probability of the prompt from ``start`` on, and whether each token is the first."""
        total, greedy = 0.0, True
        rows = zip(answer.prompt_logprobs[start:], answer.prompt_top[start:], strict=True)
        for own, top in rows:
            assert own is not None, f"no log-probability behind position {start}"
            total += own.logprob
            best = next(entry.token for entry in top if entry.token != self._never)
            greedy = greedy and best == own.token
        return total, greedy


def rolling_windows(length: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Windows of at most ``size`` tokens as (first, first scored, stop); token 0 is never scored.

    Each other token is scored once. Windows follow each other with one token of context; the last
    is as long as the others and has all the context that this leaves.
    """
    scored, stop = 1, min(length, size)
    while scored < length:
        yield max(0, stop - size), scored, stop
        scored, stop = stop, min(length, stop + size - 1)


def _scoring(ids: Sequence[int]) -> Request:
    """A request that is all prompt; the one token that it draws is of no use."""
    greedy = SamplingConfig(temperature=0.0)
    return Request(prompt=tuple(ids), max_tokens=1, sampling=greedy, prompt_logprobs=2)


def _parts(items: Sequence[Asked], size: int) -> Iterator[Sequence[Asked]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
