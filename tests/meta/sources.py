"""What the meta tests look at: source files, their syntax trees, tracked files."""

import ast
import subprocess
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "src" / "openv41"


def source_files():
    """Every Python file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


@cache
def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def walk_sources():
    """Yield (place, node) for every syntax node of the package, place as ``file:line``."""
    for path in source_files():
        yield from _placed(path)


@cache
def _placed(path):
    return [(place(path, node), node) for node in ast.walk(parse(path))]


def place(path, node):
    return f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 1)}"


def tracked_files():
    """Every file that git tracks (of a source archive: every file beside the environments)."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0:
        names = [REPOSITORY / name for name in listed.stdout.split("\0") if name]
        return [path for path in names if path.is_file()]
    hidden = (".venv", ".peers", "runs", "data")
    return [
        path
        for path in REPOSITORY.rglob("*")
        if path.is_file() and path.relative_to(REPOSITORY).parts[0] not in hidden
    ]
