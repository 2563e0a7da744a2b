"""Constrained decoding: answers that fit a JSON schema, calls that fit their tools.

llguidance, the extra ``[grammar]``, keeps the state of the grammars and computes the masks.
"""

import functools
import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool
from torch import Tensor

from openv41.engine.constraint import ConstraintError
from openv41.errors import InputError
from openv41.io.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from types import ModuleType

    from llguidance import LLMatcher, LLTokenizer

# Blanks between the tokens of JSON: a line break and nine levels of four blanks, never endless.
JSON_STYLE = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\t]{0,40}"}
# What a schema may have; llguidance 1.9 bears a little more of each.
MAX_LEVELS = 64  # its reader of JSON stops at 127
MAX_ENTRIES = 256  # of one object; the time for optional ones grows with the square of their number
MAX_CHOICES = 128  # it follows up to 2,000 possible places of an answer at once
MAX_REFERENCES = 256  # a chain of 3,000 overflows its stack
MAX_PARTS = 10_000  # 40,000 are "too large"


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar; ``matcher`` stands at its beginning and is only copied."""

    matcher: "LLMatcher"


class GrammarCompiler:
    """Compiles grammars for one tokenizer; the library's view of it is built when first needed."""

    def __init__(self, tokenizer: TextTokenizer, num_tokens: int, eos_id: int) -> None:
        self.tokenizer, self.num_tokens, self.eos_id = tokenizer, num_tokens, eos_id
        self._lock = threading.Lock()

    def json(self, schema: Mapping[str, Any]) -> Grammar:
        """Grammar of the JSON texts that fit a schema; raises InputError with what is wrong."""
        check_size(schema, "the JSON schema")
        text = json.dumps({**schema, "x-guidance": JSON_STYLE})
        grammar = load_library().LLMatcher.grammar_from_json_schema(text)
        return self._compile(grammar, "the JSON schema")

    def lark(self, text: str, what: str) -> Grammar:
        """Grammar in llguidance's kind of Lark; ``what`` it describes, for the error."""
        return self._compile(load_library().LLMatcher.grammar_from_lark(text), what)

    def advance(self, grammar: Grammar, text: str) -> Grammar:
        """Grammar of what may follow a text."""
        matcher = grammar.matcher.deep_copy()
        if not matcher.consume_tokens(self.tokenizer.encode(text)):
            raise InputError(f"{text[:60]!a}, which is to be continued, does not fit the format")
        return Grammar(matcher)

    def _compile(self, grammar: str, what: str) -> Grammar:
        with self._lock:
            tokenizer = self._vocabulary
        matcher = load_library().LLMatcher(tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some limits are only met here
        if matcher.is_error():
            reason = matcher.get_error().strip() or "no reason given"
            raise InputError(f"{what} cannot be enforced: {reason}")
        matcher.reset()
        return Grammar(matcher)

    @functools.cached_property
    def _vocabulary(self) -> "LLTokenizer":
        library = load_library()
        known = library.TokenizerWrapper(_Vocabulary(self.tokenizer, self.num_tokens, self.eos_id))
        vocabulary: LLTokenizer = library.LLTokenizer(
            known, n_vocab=self.num_tokens, eos_token=self.eos_id
        )
        return vocabulary


class _Vocabulary:
    """What llguidance wants to know of a tokenizer, under its names."""

    def __init__(self, tokenizer: TextTokenizer, num_tokens: int, eos_id: int) -> None:
        known = [tokenizer.backend.id_to_token(i) is not None for i in range(num_tokens)]
        self.tokens = [
            tokenizer.token_bytes(i) if is_known else b"" for i, is_known in enumerate(known)
        ]
        self.special_token_ids = [i for i in range(num_tokens) if tokenizer.is_special(i)]
        self.eos_token_id, self.bos_token_id = eos_id, None
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        """Token ids of a text."""
        return self._tokenizer.encode(text.decode(errors="replace"))


@dataclass(frozen=True, kw_only=True)
class AnswerConstraint:
    """What an answer in the prompt format may hold.

    Reasoning is free. After it comes what ``content`` says, else free text, in which ``calls``
    says how a block of calls goes on once its marker is written.
    """

    compiler: GrammarCompiler
    has_reasoning: bool  # the answer begins with it
    content: Grammar | None
    calls: Grammar | None
    think_end_id: int | None = None
    marker_id: int | None = None

    def begin(self) -> "AnswerGuide":
        """Guide for an answer that begins."""
        return AnswerGuide(self)


class AnswerGuide:
    """Where one answer is."""

    def __init__(self, rules: AnswerConstraint) -> None:
        self._rules = rules
        self._size = rules.compiler.num_tokens
        self._is_reasoning = rules.has_reasoning
        self._is_over = False
        self._opens_tag = False  # the text ends with "<"
        self._matcher: LLMatcher | None = None
        if not rules.has_reasoning:
            self._follow(rules.content)

    def allowed(self) -> Bool[Tensor, " V"] | None:
        """Which tokens may come next; None for all."""
        if self._is_over:
            return None
        if self._matcher is not None:
            return self._mask(self._matcher)
        rules = self._rules
        mask = torch.ones(self._size, dtype=torch.bool)
        if rules.marker_id is not None and rules.marker_id < self._size:
            mask[rules.marker_id] = rules.calls is not None and self._opens_tag
        if self._is_reasoning and rules.content is not None:
            mask[rules.compiler.eos_id] = False
        return mask

    def accept(self, token: int) -> None:
        """Take the next token, one of those allowed."""
        rules = self._rules
        if self._is_over:
            return
        if token == rules.compiler.eos_id and self._matcher is None:
            self._is_over = True
        elif self._matcher is not None:
            self._consume(self._matcher, token)
            self._is_over = token == rules.compiler.eos_id
        elif token == rules.marker_id:
            self._is_reasoning = False
            self._follow(rules.calls)
        elif token == rules.think_end_id and self._is_reasoning:
            self._is_reasoning = self._opens_tag = False
            self._follow(rules.content)
        else:
            self._opens_tag = rules.compiler.tokenizer.token_bytes(token).endswith(b"<")

    def _follow(self, grammar: Grammar | None) -> None:
        self._matcher = None if grammar is None else grammar.matcher.deep_copy()

    def _mask(self, matcher: "LLMatcher") -> Bool[Tensor, " V"]:
        packed = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
        if matcher.is_error():
            raise ConstraintError(f"the grammar of the answer failed: {_reason(matcher)}")
        bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1  # [V/8, 8]
        return bits.flatten()[: self._size].bool()

    def _consume(self, matcher: "LLMatcher", token: int) -> None:
        if not matcher.consume_token(token):
            raise ConstraintError(
                f"token {token} does not fit the grammar of the answer: {_reason(matcher)}"
            )


def _reason(matcher: "LLMatcher") -> str:
    """What went wrong, without the state of the library that follows it."""
    return matcher.get_error().partition("\n")[0]


def check_size(schema: object, what: str) -> None:
    """Refuse a schema that is too large to be enforced."""
    waiting, parts, references = [(schema, 0)], 0, 0
    while waiting:
        found, depth = waiting.pop()
        parts += 1
        below: Iterable[object] = ()
        if isinstance(found, Mapping):
            references += "$ref" in found
            choices = [found[key] for key in ("anyOf", "oneOf", "allOf") if key in found]
            most = max((len(c) for c in choices if isinstance(c, list)), default=0)
            if len(found) > MAX_ENTRIES or most > MAX_CHOICES:
                raise InputError(
                    f"{what} has an object of {len(found)} entries or a choice of {most}; at most "
                    f"{MAX_ENTRIES} and {MAX_CHOICES} can be enforced"
                )
            below = found.values()
        elif isinstance(found, list):
            below = [item for item in found if isinstance(item, Mapping | list)]
        waiting += [(item, depth + 1) for item in below]
        if depth > MAX_LEVELS or references > MAX_REFERENCES or parts > MAX_PARTS:
            raise InputError(
                f"{what} is too large to be enforced: at most {MAX_LEVELS} levels, "
                f"{MAX_REFERENCES} references and {MAX_PARTS:,} parts"
            )


def load_library() -> "ModuleType":
    """Import llguidance, or say how to get it."""
    try:
        import llguidance  # noqa: PLC0415 -- an optional extra
    except ImportError:
        raise InputError(
            "tools and response formats need llguidance, not installed here; "
            "run pip install 'openv41[grammar]'"
        ) from None
    return llguidance
