"""How an image becomes a grid of patches and a span of tokens. Report §2.1.1.

Pure Python, in float64 and in this order of operations: some results that look off by one patch
are those of the released model, which exact arithmetic would not give.
"""

import math
from dataclasses import dataclass
from enum import IntEnum

from openv41.config import VisionConfig

TEXT = -1  # in lists of token types, a position outside every span
DELIMITERS = 2  # one token before an image's first cell, one behind its last newline


class SpanToken(IntEnum):
    """What a position of an image's span is."""

    START = 0
    IMAGE = 1
    NEWLINE = 2
    END = 3


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """Patches of a resized image; ``ratio`` x ``ratio`` of them merge into a cell."""

    rows: int
    cols: int
    ratio: int

    @property
    def num_patches(self) -> int:
        """Patches of the image."""
        return self.rows * self.cols

    @property
    def cell_rows(self) -> int:
        """Rows of cells; the last one may be partly empty."""
        return -(-self.rows // self.ratio)

    @property
    def cell_cols(self) -> int:
        """Cells in a row."""
        return -(-self.cols // self.ratio)

    @property
    def span_length(self) -> int:
        """Tokens of the image: its cells, a newline behind each row, a start and an end."""
        return self.cell_rows * (self.cell_cols + 1) + DELIMITERS

    def layout(self) -> list[SpanToken]:
        """What each token of the span is."""
        row = [SpanToken.IMAGE] * self.cell_cols + [SpanToken.NEWLINE]
        return [SpanToken.START, *row * self.cell_rows, SpanToken.END]


def grid_of(width: int, height: int, vision: VisionConfig) -> ImageGrid:
    """Patch grid of an image of this many pixels, once it is resized."""
    best_width, best_height = padded_size(width, height, vision)
    patch = vision.patch_size
    return ImageGrid(best_height // patch, best_width // patch, vision.downsample_ratio)


def padded_size(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """Width and height, multiples of the patch, that an image is fitted into.

    Small images grow to ``min_pixels``; large ones shrink until their span, newlines included, has
    at most ``max_image_tokens`` tokens.
    """
    assert min(width, height) > 0, f"an image of {width} x {height} pixels"
    patch, ratio = vision.patch_size, vision.max_wh_ratio
    w: float = width
    h: float = height
    if ratio is not None and w > h * ratio:
        w = h * ratio
    if 0 < w * h < vision.min_pixels:
        scale = math.sqrt(vision.min_pixels / (w * h))
        w, h = int(w * scale), int(h * scale)
    best_width = math.ceil(w / patch) * patch
    best_height = math.ceil(h / patch) * patch
    grid = ImageGrid(best_height // patch, best_width // patch, vision.downsample_ratio)
    if grid.span_length > vision.max_image_tokens:
        best_width, best_height = _shrunk(float(w), float(h), vision)
        grid = ImageGrid(best_height // patch, best_width // patch, vision.downsample_ratio)
    assert min(grid.rows, grid.cols) > 0, f"{width} x {height} pixels give {grid}"
    assert grid.span_length <= vision.max_image_tokens, f"{width} x {height} pixels give {grid}"
    return best_width, best_height


def _shrunk(w: float, h: float, vision: VisionConfig) -> tuple[int, int]:
    """The largest size of this aspect whose span keeps to the budget."""
    patch, most = vision.patch_size, vision.max_image_tokens - DELIMITERS
    cell = patch * vision.downsample_ratio
    aspect = h / w
    cols = math.sqrt(most / aspect + 0.25) - 0.5
    rows = cols * aspect
    if cols < 1:
        return cell, most // 2 * cell
    if rows < 1:
        return (most - 1) * cell, cell
    scale = min(math.floor(cols) * cell / w, math.floor(rows) * cell / h)
    fitted = (math.floor(side * scale / patch) * patch for side in (w, h))
    best_width, best_height = (max(patch, side) for side in fitted)  # 0 only without merging
    return best_width, best_height
