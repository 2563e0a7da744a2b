"""Lines that are kept until all are there, whoever wrote the first of them."""

from openv41.io.resumable_lines import ResumableLines


def test_lines_are_taken_over_from_a_head_that_is_spelled_otherwise(tmp_path):
    """Equal numbers may have another spelling, and a head another length."""
    with ResumableLines(tmp_path / "lines", {"temperature": 1.0}) as lines:
        lines.add(["one", "two"])
    with ResumableLines(tmp_path / "lines", {"temperature": 1}) as lines:
        assert lines.rounds == 1
        lines.add(["three"])
        lines.finish()
    assert (tmp_path / "lines").read_text() == "one\ntwo\nthree\n"
    assert [path.name for path in tmp_path.iterdir()] == ["lines"]
