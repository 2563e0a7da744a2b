"""No module repeats twelve lines of another."""

from tests.meta.sources import REPOSITORY, source_files

LENGTH = 12


def code_lines(path):
    """Lines that carry code, stripped; imports and closing brackets alone say nothing."""
    out = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        if text and not text.startswith(("import ", "from ", "#")):
            out.append((number, text))
    return out


def duplicates(paths):
    first, found = {}, []
    for path in paths:
        lines = code_lines(path)
        for start in range(len(lines) - LENGTH + 1):
            window = tuple(text for _, text in lines[start : start + LENGTH])
            where = (path, lines[start][0])
            other = first.setdefault(window, where)
            if other[0] != path:
                found.append((other, where))
    return found


def test_modules_do_not_repeat_each_other():
    found = [
        f"{b.relative_to(REPOSITORY)}:{m} repeats {a.relative_to(REPOSITORY)}:{n}"
        for (a, n), (b, m) in duplicates(source_files())
    ]
    assert not found, "\n".join(found)


def test_a_repetition_is_found(tmp_path):
    text = "\n".join(f"x{i} = {i}" for i in range(LENGTH))
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "b.py").write_text("y = 1\n\n" + text)
    found = duplicates([tmp_path / "a.py", tmp_path / "b.py"])
    assert [(a.name, n, b.name, m) for (a, n), (b, m) in found] == [("a.py", 1, "b.py", 3)]
