"""Text streams against the whole text, for every way to cut it into tokens."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openv41.engine import stops as stops_module
from openv41.engine.stops import TextStream
from openv41.io.tokenizer import TextTokenizer, train_tokenizer


class Pieces(TextTokenizer):
    """A tokenizer whose tokens stand for given bytes."""

    def __init__(self, pieces):
        self.pieces = pieces
        self.asked = 0

    def token_bytes(self, token_id):
        self.asked += 1
        return self.pieces[token_id]


def stream(pieces, *stop):
    """Released pieces, with that of ``finish`` last, and the matched stop string."""
    text = TextStream(Pieces(pieces), stop)
    released = [text.push(token) for token in range(len(pieces))]
    return [*released, text.finish()], text.matched


def naive(data, stop):
    """Search every end of the whole text, from the left, for every stop string."""
    text = data.decode("utf-8", errors="replace")
    for end in range(1, len(text) + 1):
        for start in range(end):
            if text[start:end] in stop:
                return text[:start], text[start:end]
    return text, None


def held(text, stop):
    """Longest end of the text that a stop string may begin with."""
    for start in range(len(text)):
        if any(s.startswith(text[start:]) and s != text[start:] for s in stop):
            return text[start:]
    return ""


ALPHABET = "ab\u00e9\U0001f642\ufffd"
broken = [b"\xc3", b"\xa9", b"\xf0", b"\x9f", b"\x99", b"\xff", b"\xe0\x80", b"\xed\xa0", b"\xf4"]
atoms = st.sampled_from([*(c.encode() for c in ALPHABET), b"a", b"b", b"aab", *broken])
texts = st.lists(atoms, max_size=20).map(b"".join) | st.binary(max_size=12)
stops = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)


@st.composite
def cut_texts(draw):
    data = draw(texts)
    places = draw(st.lists(st.integers(0, len(data)), max_size=len(data)))
    edges = [0, *sorted(places), len(data)]  # some pieces are empty
    return [data[a:b] for a, b in pairwise(edges)]


@pytest.mark.property
@given(pieces=cut_texts(), stop=stops)
def test_pieces_join_to_the_text_before_the_first_stop_string(pieces, stop):
    released, matched = stream(pieces, *stop)
    assert ("".join(released), matched) == naive(b"".join(pieces), stop)


@pytest.mark.property
@given(text=st.text("ab", max_size=30), stop=st.lists(st.text("ab", min_size=1, max_size=7)))
def test_nothing_more_is_held_back_than_a_beginning(text, stop):
    growing, released = TextStream(Pieces([c.encode() for c in text]), stop), ""
    for place in range(len(text)):
        released += growing.push(place)
        if growing.matched:
            break
        assert released + held(text[: place + 1], stop) == text[: place + 1]
    assert (released + growing.finish(), growing.matched) == naive(text.encode(), stop)


@pytest.mark.parametrize(
    ("text", "stop", "want", "matched"),
    [
        ("one stop two", ["stop"], "one ", "stop"),
        ("stop", ["stop"], "", "stop"),
        ("sto", ["stop"], "sto", None),
        ("aab", ["ab"], "a", "ab"),
        ("aaab", ["aab"], "a", "aab"),
        ("abababac", ["ababac"], "ab", "ababac"),  # starts inside text that was held back
        ("xx end y STOP", ["STOP", "end"], "xx ", "end"),
        ("abcd", ["abcd", "cd"], "", "abcd"),  # both end here, the longest wins
        ("abcd", ["abcd", "bc"], "a", "bc"),  # complete before the longer one
        ("abce", ["abcd", "ce"], "ab", "ce"),
        ("aa", ["a", "a"], "", "a"),
        ("caf\u00e9\n\nx", ["\u00e9\n\n"], "caf", "\u00e9\n\n"),
        ("plain", [], "plain", None),
    ],
)
def test_by_hand(text, stop, want, matched):
    data = text.encode()
    for size in (1, 2, 3, len(data)):
        pieces = [data[i : i + size] for i in range(0, len(data), size)]
        released, found = stream(pieces, *stop)
        assert ("".join(released), found) == (want, matched)


def test_a_stop_string_ends_the_text_for_good():
    released, matched = stream([b"a", b"b", b"cd", b"ef", b"abc"], "bc")
    assert (released, matched) == (["a", "", "", "", "", ""], "bc")


def test_what_cannot_be_a_stop_string_any_more_is_released_at_once():
    released, matched = stream([b"x<", b"/", b"b", b"<", b"/a"], "</a>")
    assert (released, matched) == (["x", "", "</b", "", "", "</a"], None)


def test_half_a_character_waits_and_a_broken_one_is_replaced():
    assert stream([b"\xf0\x9f", b"\x99", b"\x82", b"!"])[0] == ["", "", "\U0001f642", "!", ""]
    assert stream([b"\xf0\x9f", b"a"])[0] == ["", "\ufffda", ""]
    assert stream([b"a", b"\xf0\x9f\x99"])[0] == ["a", "", "\ufffd"]


def test_a_replacement_can_complete_a_stop_string_at_the_end():
    assert stream([b"ab", b"\xc3"], "b\ufffd") == (["a", "", ""], "b\ufffd")


def test_every_token_is_read_once():
    text = TextStream(tokenizer := Pieces([b"ab"] * 1000), ["ab" * 400 + "c", "b" * 50])
    for token in range(1000):
        text.push(token)
    assert text.finish() == "ab" * 400
    assert tokenizer.asked == 1000


def test_a_long_stop_string_takes_a_few_steps_per_character():
    """A search that starts over would compare 10^8 characters here."""
    long = "a" * 20_000
    text = TextStream(Pieces([long.encode() + b"c"]), [long + "b"])
    assert text.push(0) == long + "c"
    assert text.finish() == ""


def test_the_choices_of_a_request_share_their_tables(monkeypatch):
    grown, grow = [], stops_module._grow
    monkeypatch.setattr(stops_module, "_grow", lambda *args: grown.append(args[-1]) or grow(*args))
    for _ in range(128):
        TextStream(Pieces([]), ["shared " * 9])
    assert len(grown) == len("shared " * 9) - 1


def test_with_a_real_tokenizer(tmp_path):
    (tmp_path / "text").write_text("the end of the text, the end of the line. " * 20)
    tokenizer = train_tokenizer([tmp_path / "text"], vocab_size=270)
    whole = "The text \u2014 \U0001f642 \u2014 then the end of the line."
    ids = tokenizer.encode(whole)
    assert len(ids) < len(whole.encode())
    text = TextStream(tokenizer, ["e end", "line."])
    pieces = [text.push(token) for token in ids]
    assert "".join(pieces) == whole[: whole.index("e end")]
    assert text.matched == "e end"
    assert text.finish() == ""
    plain = TextStream(tokenizer)
    assert "".join([plain.push(token) for token in ids] + [plain.finish()]) == whole


def test_empty_stop_strings_are_refused():
    with pytest.raises(AssertionError, match="an empty stop string ends every text"):
        TextStream(Pieces([]), ["a", ""])
