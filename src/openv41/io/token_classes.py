"""Which tokens count as the same word for the n-gram memory. Report §2.4.2.

Tokens that differ only by case, accents or blanks share one class, so that n-grams are counted over
words rather than spellings. The rule runs on the ``tokenizers`` library throughout, since the map
depends on that library's Unicode tables.
"""

import hashlib

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

_REPLACEMENT = "\ufffd"  # in a decoded token: its bytes are no complete character
_KEPT_BLANK = "\ue000"  # private use: stands for a lone blank while the others are stripped


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _KEPT_BLANK),
            normalizers.Strip(),
            normalizers.Replace(_KEPT_BLANK, " "),
        ]
    )


def compress_vocabulary(tokenizer: Tokenizer) -> list[int]:
    """Class of every token id, numbered in the order of first appearance. Report §2.4.2.

    Byte fragments (no complete character) are told apart by their raw token string; all other
    tokens by their normalised text, or the text itself where nothing is left of it.
    """
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    texts = tokenizer.decode_batch([[i] for i in range(size)], skip_special_tokens=False)
    normalize = _normalizer().normalize_str
    classes: dict[str, int] = {}
    token_map = []
    for token_id, text in enumerate(texts):
        if _REPLACEMENT in text:
            key = tokenizer.id_to_token(token_id) or text
        else:
            key = normalize(text) or text
        token_map.append(classes.setdefault(key, len(classes)))
    return token_map


def map_sha256(token_map: list[int]) -> str:
    """Hash of a token map, as little-endian int32."""
    return hashlib.sha256(np.asarray(token_map, dtype="<i4").tobytes()).hexdigest()
