"""Tokenizers: load, encode text that is never an instruction, train small ones.

The released tokenizer and those trained here are byte-level: every text comes back byte for byte.
"""

import codecs
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from openv41.errors import DataError, InputError
from openv41.io.atomic import write_atomic
from openv41.prompt.tokens import (
    ASSISTANT,
    DSML,
    IMAGE,
    LATEST_REMINDER,
    SYSTEM,
    TASKS,
    THINK,
    THINK_END,
    USER,
    task_token,
)

BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
SPECIAL_TOKENS = (  # full-width bars and low-line blocks, spelled as in the released tokenizer
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<\uff5c\u2581pad\u2581\uff5c>",
)
PROMPT_TOKENS = (
    *(SYSTEM, USER, ASSISTANT, LATEST_REMINDER, THINK, THINK_END, DSML, IMAGE),
    *map(task_token, TASKS),
)
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256  # every byte has a token
MAX_VOCAB_SIZE = 1 << 24
TOKENIZER_FILE, SETTINGS_FILE = "tokenizer.json", "tokenizer_config.json"
MODEL_MAX_LENGTH = 1048576

# How the released tokenizer cuts text before BPE: numbers, Chinese and Japanese, everything else.
_SPLITS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_PIECE = 1 << 16  # characters handed to the tokenizer at once


class TextTokenizer:
    """A tokenizer that keeps user text and special tokens apart.

    ``backend`` is the tokenizer as stored. ``encode`` runs on a second one without added tokens:
    a user who types the spelling of a special token gets ordinary text tokens.
    """

    def __init__(self, data: bytes, where: str) -> None:
        self.data = data
        self.where = where
        self.sha256 = hashlib.sha256(data).hexdigest()
        content = _parse(data, where)
        self.backend = _build(data.decode(), where)
        added = content.get("added_tokens") or []
        self._special: dict[str, int] = {token["content"]: token["id"] for token in added}
        self._special_text = {token_id: text for text, token_id in self._special.items()}
        self.vocab_size = 1 + max([*_model_ids(content["model"]), *self._special_text], default=-1)
        if not self.vocab_size:
            raise DataError(f"{where} holds no token; give a tokenizer.json with a vocabulary")
        self._byte_of = _byte_alphabet() if _is_byte_level(content) else None

    @functools.cached_property
    def _plain(self) -> Tokenizer:
        content = _parse(self.data, self.where)
        return _build(json.dumps({**content, "added_tokens": []}, ensure_ascii=False), self.where)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; special spellings inside it are plain text too."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several plain texts."""
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InputError(
                    f"text is not valid Unicode: {text[error.start]!a} at character {error.start}; "
                    "remove lone surrogates"
                ) from None
        found = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def special_id(self, text: str) -> int:
        """Id of a special token, by its spelling."""
        if text not in self._special:
            raise InputError(
                f"{self.where} has no special token {text!a}; 'openv41 tokenizer train' adds those "
                "of chats and images with --prompt-format"
            )
        return self._special[text]

    def has_special(self, text: str) -> bool:
        """Whether there is a special token of this spelling."""
        return text in self._special

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a special one, which no plain text becomes."""
        return token_id in self._special_text

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one token stands for; a character may span several tokens."""
        token = self.backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            raise InputError(
                f"token id {token_id} is outside the vocabulary of {self.vocab_size} ({self.where})"
            )
        if token_id in self._special_text:
            return self._special_text[token_id].encode()
        if self._byte_of is None:
            return self.backend.decode([token_id], skip_special_tokens=False).encode()
        return bytes(self._byte_of[character] for character in token)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Bytes of a sequence of tokens, special tokens spelled out."""
        if self._byte_of is None:
            return self.backend.decode(list(ids), skip_special_tokens=False).encode()
        return b"".join(self.token_bytes(token_id) for token_id in ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a sequence of tokens; bytes that are no character become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, byte for byte as loaded, and tokenizer_config.json."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / SETTINGS_FILE, self._settings())
            write_atomic(folder / TOKENIZER_FILE, self.data)
        except OSError as error:
            raise DataError(f"{folder}: cannot write the tokenizer: {error}") from None

    def _settings(self) -> bytes:
        names = ("bos_token", "eos_token", "pad_token")
        settings: dict[str, Any] = {
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MODEL_MAX_LENGTH,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        for name, token_id in zip(names, (BOS_ID, EOS_ID, PAD_ID), strict=True):
            if token_id in self._special_text:
                settings[name] = self._special_text[token_id]
        return json.dumps(settings, ensure_ascii=False, indent=2, sort_keys=True).encode() + b"\n"


def load_tokenizer(path: Path) -> TextTokenizer:
    """Load a tokenizer.json, or the one in a folder."""
    file = path / TOKENIZER_FILE if path.is_dir() else path
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DataError(
            f"{file}: cannot read the tokenizer: {error.strerror}; make one with "
            "'openv41 tokenizer train' or 'openv41 tokenizer fetch-released'"
        ) from None
    return TextTokenizer(data, str(file))


def train_tokenizer(
    files: Sequence[Path], *, vocab_size: int, prompt_format: bool = False
) -> TextTokenizer:
    """Byte-level BPE with ``vocab_size`` tokens, learned from text files; deterministic.

    With ``prompt_format`` it also has the special tokens of the prompt format.
    """
    special = (*SPECIAL_TOKENS, *PROMPT_TOKENS) if prompt_format else SPECIAL_TOKENS
    if vocab_size < len(special) + 256:
        raise InputError(
            f"vocab_size is {vocab_size}, must be at least {len(special) + 256}: "
            f"{len(special)} special tokens and 256 bytes"
        )
    if vocab_size > MAX_VOCAB_SIZE:
        raise InputError(f"vocab_size is {vocab_size}, must be at most {MAX_VOCAB_SIZE}")
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in special],
        initial_alphabet=sorted(_byte_alphabet()),
        show_progress=False,
    )
    texts = (piece for file in files for piece in read_pieces(file))
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size(with_added_tokens=True)
    if found != vocab_size:
        names = ", ".join(str(file) for file in files)
        raise DataError(
            f"{names}: enough text for {found} tokens, {vocab_size} asked for; "
            f"give more text or set the vocabulary size to at most {found}"
        )
    return TextTokenizer(tokenizer.to_str(pretty=True).encode() + b"\n", "the trained tokenizer")


def read_pieces(file: Path, piece: int = _PIECE) -> Iterator[str]:
    """Text of a UTF-8 file, streamed in pieces that join to the whole.

    Pieces end between a newline and a letter where they can: no token spans that place, so the
    pieces give the same tokens as the whole text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    buffer, position, pending = "", 0, 0  # position counts the bytes decoded so far
    try:
        with file.open("rb") as source:
            while chunk := source.read(piece):
                pending = len(decoder.getstate()[0])
                buffer += decoder.decode(chunk)
                position += len(chunk)
                if len(buffer) > piece:
                    end = _seam(buffer)
                    yield buffer[:end]
                    buffer = buffer[end:]
            pending = len(decoder.getstate()[0])
            buffer += decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        offset = position - pending + error.start
        raise DataError(
            f"{file}: not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset {offset}; "
            "convert the file to UTF-8"
        ) from None
    except OSError as error:
        raise DataError(f"{file}: cannot read the text: {error.strerror}") from None
    if buffer:
        yield buffer


def _seam(text: str) -> int:
    """Last place between a newline and an ASCII letter, else after a newline, else the end."""
    newline = last = text.rfind("\n", 0, len(text) - 1)
    while newline >= 0:
        follower = text[newline + 1]
        if follower.isascii() and follower.isalpha():
            return newline + 1
        newline = text.rfind("\n", 0, newline)
    return last + 1 or len(text)


def _parse(data: bytes, where: str) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except ValueError as error:
        raise DataError(f"{where}: not a tokenizer: no valid JSON ({error})") from None
    if not isinstance(content, dict) or "model" not in content:
        raise DataError(f"{where}: not a tokenizer: the JSON has no 'model'")
    return content


def _model_ids(model: dict[str, Any]) -> Iterable[int]:
    vocabulary = model.get("vocab", {})
    return vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))


def _build(text: str, where: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{where}: not a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _is_byte_level(content: dict[str, Any]) -> bool:
    decoder = content.get("decoder") or {}
    return any(part.get("type") == "ByteLevel" for part in decoder.get("decoders", [decoder]))


def _byte_alphabet() -> dict[str, int]:
    """Printable character that byte-level BPE writes for each byte.

    Visible Latin-1 bytes stand for themselves, the other 68 take U+0100 onwards.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}
