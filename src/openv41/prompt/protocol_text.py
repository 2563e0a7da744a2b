"""Fixed texts of the prompt format: those of the released encoder, byte for byte, in ``data/``."""

import functools
from collections.abc import Iterator, Sequence
from importlib import resources

from openv41.prompt.dsml import dump_json
from openv41.prompt.messages import JsonObject, describe_tool
from openv41.prompt.tokens import Piece, split_markers


@functools.cache
def _read(name: str) -> str:
    file = resources.files("openv41.prompt") / "data" / name
    return file.read_text(encoding="utf-8")


def effort_line(effort: int) -> str:
    """Text that opens every prompt in thinking mode."""
    return _read("effort.txt").replace("{effort}", str(effort)) + "\n"


def tools_block(tools: Sequence[JsonObject]) -> Iterator[Piece]:
    """How tools are called, with the markers as special tokens, and one line for each tool."""
    before, after = _read("tools.txt").split("{tool_schemas}")
    schemas = "\n".join(dump_json(describe_tool(tool), "tool") for tool in tools)
    yield from split_markers(before)
    yield Piece(schemas, False)
    yield from split_markers(after)


def response_format_block(schema: JsonObject) -> str:
    """What the answer must look like."""
    return _read("response_format.txt") + dump_json(schema, "response_format")
