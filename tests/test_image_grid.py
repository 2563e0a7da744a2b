"""Sizes, grids and spans of images: the released numbers, and what holds for every size."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openv41.config import VisionConfig
from openv41.image_grid import ImageGrid, SpanToken, grid_of, padded_size
from openv41.presets import released

VISION = released().vision
START, IMAGE, NEWLINE, END = SpanToken


@pytest.mark.golden
def test_released_sizes(golden_dir):
    table = json.loads((golden_dir / "ops" / "released_image_sizing.json").read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert len(rows) == 414
    for row in rows:
        width, height = row["width"], row["height"]
        grid = grid_of(width, height, VISION)
        found = (*padded_size(width, height, VISION), grid.cols, grid.rows)
        want = ("resized_width", "resized_height", "vit_w", "vit_h")
        assert found == tuple(row[name] for name in want), row
        want = ("llm_w", "llm_h", "tokens")
        found = (grid.cell_cols, grid.cell_rows, grid.span_length)
        assert found == tuple(row[name] for name in want), row


@pytest.mark.golden
def test_vectors(shared_dir):
    rows = json.loads((shared_dir / "vectors" / "v41_image_grid.json").read_text())
    assert len(rows) == 15
    for row in rows:
        grid = grid_of(row["width"], row["height"], VISION)
        assert [grid.rows, grid.cols] == row["vit_grid"]
        assert [grid.cell_rows, grid.cell_cols] == row["llm_grid"]
        assert grid.span_length == row["span_tokens"]
        padded = padded_size(row["width"], row["height"], VISION)
        assert padded == (row["pad_to_w"], row["pad_to_h"])


@pytest.mark.parametrize(
    ("size", "padded", "tokens"),
    [
        ((100_000, 60), (42_882, 42), 1024),
        ((50_000, 10), (42_882, 42), 1024),
        ((10, 20_000), (42, 21_462), 1024),
        ((1302, 1302), (1302, 1302), 994),
        ((1345, 1345), (1302, 1302), 994),
    ],
)
def test_extremes(size, padded, tokens):
    assert padded_size(*size, VISION) == padded
    assert grid_of(*size, VISION).span_length == tokens


sides = st.one_of(st.integers(1, 60), st.integers(1, 5000), st.integers(1, 200_000))
settings = st.fixed_dictionaries(
    {},
    optional={
        "downsample_ratio": st.integers(1, 4),
        "max_image_tokens": st.integers(4, 1024),
        "min_pixels": st.integers(1, 295_936),
        "patch_size": st.sampled_from([2, 14, 16]),
    },
)


@pytest.mark.property
@given(sides, sides, settings)
def test_every_size_has_cells_within_the_budget(width, height, changes):
    vision = replace(VISION, **changes)
    grid = grid_of(width, height, vision)
    assert min(grid.rows, grid.cols, grid.cell_rows, grid.cell_cols) >= 1
    assert grid.span_length <= vision.max_image_tokens
    layout = grid.layout()
    assert len(layout) == grid.span_length
    assert layout.count(IMAGE) == grid.cell_rows * grid.cell_cols
    assert layout.count(NEWLINE) == grid.cell_rows
    assert (layout.index(START), layout.index(END)) == (0, len(layout) - 1)


def test_layout_is_in_reading_order():
    grid = ImageGrid(rows=4, cols=7, ratio=3)
    row = [IMAGE, IMAGE, IMAGE, NEWLINE]
    assert grid.layout() == [START, *row, *row, END]
    assert [int(token) for token in SpanToken] == [0, 1, 2, 3]


def test_a_wide_image_is_squeezed_where_the_config_says_so():
    squeezing = replace(VISION, max_wh_ratio=2.0)
    assert padded_size(4000, 500, squeezing) == padded_size(1000, 500, VISION)
    assert padded_size(4000, 500, VISION) != padded_size(1000, 500, VISION)
    assert padded_size(500, 4000, squeezing) == padded_size(500, 4000, VISION)  # width alone


def test_a_budget_without_room_for_a_cell_is_refused():
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "intermediate_size": 8}
    with pytest.raises(ValueError, match="max_image_tokens is 3, must be at least 4"):
        VisionConfig(**sizes, max_image_tokens=3)


def test_counting_tokens_needs_no_torch():
    code = "import sys, openv41.image_grid; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
