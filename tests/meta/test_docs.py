"""Pages: links resolve, code runs, nothing about machines."""

import re

import pytest

from benchmarks import tables
from tests.meta.sources import REPOSITORY, tracked_files

PAGES = sorted(
    path
    for path in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    if path.is_file()
)
LINK = re.compile(r"(?<!`)\[[^\]\n]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Written in parts, so that this file does not hold what it looks for.
MACHINE_WORDS = [
    "/" + "work/", "/" + "tmp/", "/" + "root/", "/" + "home/", "py" + "pi.org/simple",
    "files.python" + "hosted.org", "extra-index" + "-url",
    "index-" + "url", "find-" + "links",
]  # fmt: skip


def anchors(text):
    """Anchors that GitHub gives to the headings of a page."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken_links(page):
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if re.match(r"https?:|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        aim = (page.parent / name) if name else page
        known = anchors(aim.read_text("utf-8")) if aim.suffix == ".md" and aim.exists() else set()
        if not aim.exists() or (anchor and aim.suffix == ".md" and anchor not in known):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_links_resolve(page):
    assert list(broken_links(page)) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One two\n[a](#one-two) [b](#three) [c](lost.md) [d](page.md#one-two)\n")
    assert list(broken_links(page)) == ["#three", "lost.md"]


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if CODE.search(p.read_text(encoding="utf-8"))],
    ids=lambda p: str(p.relative_to(REPOSITORY)),
)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for block in CODE.findall(page.read_text(encoding="utf-8")):
        exec(compile(block, str(page), "exec"), names)


def test_readme_says_at_once_that_the_project_is_independent():
    first = (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()[0]
    assert "independent" in first.lower()
    assert "not affiliated with DeepSeek" in first


def test_tracked_files_speak_of_no_machine():
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        hits = [word for word in MACHINE_WORDS if word in text]
        found += [f"{path.relative_to(REPOSITORY)}: {hit}" for hit in hits]
    assert not found, "\n".join(found)


def test_no_file_is_large():
    large = [str(p.relative_to(REPOSITORY)) for p in tracked_files() if p.stat().st_size > 200_000]
    assert not large, f"above 200 kB: {large}"


@pytest.mark.parametrize("page", tables.PAGES)
def test_tables_are_those_of_the_recorded_lines(page):
    text = (tables.DOCS / page).read_text(encoding="utf-8")
    assert tables.filled(page) == text, "run python -m benchmarks.tables"
    assert text.count("\n| ") > 4
