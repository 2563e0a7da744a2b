"""The map from the report to the files is complete and its page is current."""

import pytest

from openv41.errors import InputError
from openv41.report_map import PENDING, SECTIONS, as_markdown, find_mentions, mentions_of
from tests.meta.sources import REPOSITORY


def test_every_section_has_a_file_or_is_pending():
    found = {mention.section for mention in find_mentions()}
    lost = [section for section in SECTIONS if section not in found | set(PENDING)]
    assert not lost, f"no docstring names {lost} as its source"


def test_only_sections_of_the_report_are_named():
    known = {*SECTIONS, "3.1.3", "3.2.2"}
    wrong = [f"{m.path}:{m.line} §{m.section}" for m in find_mentions() if m.section not in known]
    assert not wrong, wrong


def test_pending_sections_are_sections():
    assert set(PENDING) <= set(SECTIONS)


def test_page_is_the_generated_text():
    page = (REPOSITORY / "docs" / "report_map.md").read_text(encoding="utf-8")
    assert page == as_markdown(), "docs/report_map.md is stale; run: make map"


def test_docstrings_give_section_line_and_name(tmp_path):
    package = tmp_path / "toy"
    package.mkdir()
    text = '"""Toy. Report §2.2, §2.3.1."""\n\n\ndef f():\n    """Do. Report §2.4.1, Eq. (6)."""\n'
    (package / "a.py").write_text(text + "\n\ndef g():\n    # Report §2.5\n    pass\n")
    found = [(m.section, m.path, m.line, m.name) for m in find_mentions(package)]
    assert found == [
        ("2.2", "toy/a.py", 1, ""),
        ("2.3.1", "toy/a.py", 1, ""),
        ("2.4.1", "toy/a.py", 4, "f"),
    ]


def test_a_section_does_not_include_its_namesakes():
    with pytest.raises(InputError, match=r"no section '2\.33' here"):
        mentions_of("2.33")
