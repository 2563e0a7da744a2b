"""A new option is a decision: the list of all of them is pinned."""

from tests.meta.cli_options import PINNED, current_options


def test_options_are_the_pinned_ones():
    pinned = PINNED.read_text(encoding="utf-8")
    assert current_options() == pinned, "if the change is meant, run: make map"
