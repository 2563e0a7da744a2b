"""Every dimension of a shape annotation or shape comment stands in the legend of docs/notation.md.

A dimension is a letter of the legend, a number, a lower-case word (a size that only one operation
knows), or a sum, product or quotient of these.
"""

import ast
import io
import re
import tokenize

import jaxtyping
import pytest

from tests.meta.sources import REPOSITORY, parse, place, source_files

LETTERS = set(
    re.findall(r"^\| ([A-Z]) \|", (REPOSITORY / "docs/notation.md").read_text(), re.MULTILINE)
)
PARTS = re.compile(r"[A-Za-z_]\w*|\d+")
SHAPE = re.compile(r"# (\[[^\]]*\](, \[[^\]]*\])*)")


def unknown_parts(axis):
    """Return the names in one axis that are not in the legend."""
    axis = axis.lstrip("*#?_").split("=")[-1]
    names = [part for part in PARTS.findall(axis) if not part.isdigit()]
    return [name for name in names if name not in LETTERS and not name.islower()]


def annotations(tree):
    """Yield (node, shape string) of each jaxtyping annotation."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple)):
            continue
        name = getattr(node.value, "id", getattr(node.value, "attr", ""))
        shape = node.slice.elts[-1]
        if hasattr(jaxtyping, name) and isinstance(getattr(shape, "value", None), str):
            yield node, shape.value


def shape_comments(source):
    """Yield (line, dims) of each comment that starts with shapes, such as ``# [T, N], [T]``."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        match = SHAPE.match(token.string) if token.type == tokenize.COMMENT else None
        if match:
            yield token.start[0], re.findall(r"[^\[\],\s]+", match[1])


def test_the_legend_is_read():
    assert len(LETTERS) == 22
    assert {"B", "T", "H", "V"} <= LETTERS


@pytest.mark.parametrize(
    ("axis", "unknown"),
    [
        *[(known, []) for known in ("T", "*rows", "W+K", "N*(N+2)", "...", "3", "_", "dim=D")],
        ("Y", ["Y"]),
        ("T*Foo", ["Foo"]),
    ],
)
def test_axes_are_split_into_their_parts(axis, unknown):
    assert unknown_parts(axis) == unknown


def test_annotations_follow_the_legend():
    wrong, seen = [], 0
    for path in source_files():
        for node, shape in annotations(parse(path)):
            seen += 1
            wrong += [f"{place(path, node)}: {u}" for a in shape.split() for u in unknown_parts(a)]
    assert not wrong, "not in the legend of docs/notation.md:\n" + "\n".join(wrong)
    assert seen > 50, f"found only {seen} shape annotations"


def test_shape_comments_follow_the_legend():
    wrong = []
    for path in source_files():
        for line, dims in shape_comments(path.read_text(encoding="utf-8")):
            where = f"{path.relative_to(REPOSITORY)}:{line}"
            wrong += [f"{where}: {u}" for d in dims for u in unknown_parts(d)]
    assert not wrong, "not in the legend of docs/notation.md:\n" + "\n".join(wrong)
