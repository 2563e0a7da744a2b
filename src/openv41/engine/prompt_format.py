"""From the engine's events to what an answer in the prompt format says."""

import codecs
from collections import deque

from openv41.engine.request import Event
from openv41.io.tokenizer import TextTokenizer
from openv41.prompt import Event as PromptEvent
from openv41.prompt import Section, StreamParser, TextDelta
from openv41.prompt.tokens import ASSISTANT, BOS, DSML, EOS, SYSTEM, THINK, THINK_END, USER

NEEDED = (BOS, EOS, SYSTEM, USER, ASSISTANT, THINK, THINK_END, DSML)


def missing_tokens(tokenizer: TextTokenizer) -> tuple[str, ...]:
    """Special tokens of the prompt format that a tokenizer lacks."""
    return tuple(text for text in NEEDED if not tokenizer.has_special(text))


class AnswerReader:
    """Reads the events of one answer and tells what each says.

    Only special tokens that the model drew are markers; their spelling in text is text. ``section``
    is where the answer starts; None: it is plain text, without any markers.
    """

    def __init__(self, tokenizer: TextTokenizer, section: Section | None) -> None:
        self._tokenizer = tokenizer
        self._parser = None if section is None else StreamParser(section)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._coming: deque[tuple[int, bool]] = deque()  # lengths of texts drawn but not yet told
        self._begun = ""  # of a special token that is told in parts

    def read(self, event: Event) -> list[PromptEvent]:
        """What an event of the engine adds."""
        if self._parser is None:
            return [TextDelta(event.text)] if event.text else []
        if event.token is not None:
            self._expect(event.token)
        said: list[PromptEvent] = []
        text = event.text
        while text:
            length, is_special = self._coming.popleft() if self._coming else (len(text), False)
            part, text = text[:length], text[length:]
            if len(part) < length:
                self._coming.appendleft((length - len(part), is_special))
            if is_special and len(part) < length:
                self._begun += part
                continue
            said += self._parser.feed(self._begun + part if is_special else part, is_special)
            self._begun = "" if is_special else self._begun
        if event.finish_reason is not None:
            said += self._parser.finish()
        return said

    def _expect(self, token: int) -> None:
        """Note the text that a token stands for; some of it may come with a later event."""
        data = self._tokenizer.token_bytes(token)
        length = len(self._decoder.decode(data))
        own = len(data.decode()) if self._tokenizer.is_special(token) else 0
        for part, is_special in ((length - own, False), (own, True)):
            if part:
                self._coming.append((part, is_special))
