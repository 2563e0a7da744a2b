"""Sizes that keep every part readable."""

import ast

from tests.meta.sources import PACKAGE, REPOSITORY, parse, place, source_files

FILE, KERNEL_FILE = 500, 600
FUNCTION, KERNEL_BODY, FORWARD = 60, 120, 40
INIT_PARAMETERS = 10
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def is_kernel_file(path):
    return path.stem.endswith("_triton")


def functions():
    for path in source_files():
        for node in ast.walk(parse(path)):
            if isinstance(node, FUNCTIONS):
                yield path, node


def length(node):
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return node.end_lineno - first + 1


def test_files_are_short():
    long = []
    for path in [*source_files(), *(REPOSITORY / "tests").rglob("*.py")]:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > (KERNEL_FILE if is_kernel_file(path) else FILE):
            long.append(f"{path.relative_to(REPOSITORY)}: {lines} lines")
    assert not long, "\n".join(long)


def test_functions_are_short():
    long = []
    for path, node in functions():
        budget = KERNEL_BODY if is_kernel_file(path) else FUNCTION
        if node.name == "forward":
            budget = FORWARD
        if length(node) > budget:
            long.append(f"{place(path, node)} {node.name}: {length(node)} lines, budget {budget}")
    assert not long, "\n".join(long)


def test_constructors_take_few_parameters():
    many = []
    for path, node in functions():
        if node.name == "__init__":
            spec = node.args
            count = len([*spec.posonlyargs, *spec.args, *spec.kwonlyargs]) - 1  # without self
            if count > INIT_PARAMETERS:
                many.append(f"{place(path, node)}: {count} parameters")
    assert not many, "\n".join(many)


def test_file_names_say_what_is_inside():
    vague = {"utils", "util", "helpers", "helper", "common", "misc", "base", "core", "tools"}
    found = [str(p.relative_to(PACKAGE)) for p in source_files() if p.stem.strip("_") in vague]
    assert not found, f"name the file after what it holds: {found}"
