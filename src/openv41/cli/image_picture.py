"""Draws an inspected image: its patches, its tokens, its experts."""

from pathlib import Path
from typing import TYPE_CHECKING

from openv41.errors import InputError
from openv41.image_grid import SpanToken
from openv41.io.atomic import atomic_path
from openv41.io.inspect_image import Inspection, restored_pixels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    SpanToken.START: "#1f5fbf",
    SpanToken.IMAGE: "#dbe4ee",
    SpanToken.NEWLINE: "#e07b00",
    SpanToken.END: "#30363d",
}
MAX_LABELS = 260  # cells beyond this carry no number


def draw_inspection(found: Inspection, title: str, out: Path) -> None:
    """Write the picture as PNG, whole or not at all."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 -- an optional extra
    except ImportError:
        raise InputError("the picture needs matplotlib; pip install 'openv41[plot]'") from None
    layers = len(found.text_share)
    figure = Figure(figsize=(13, 4.2 + 0.11 * layers), dpi=140, layout="constrained")
    image, tokens, experts = figure.subplots(1, 3, width_ratios=(1, 1, 1.5))
    _draw_patches(image, found)
    _draw_tokens(tokens, found)
    _draw_experts(experts, found)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    with atomic_path(out) as temporary:
        figure.savefig(temporary, format="png")


def _draw_patches(axes: "Axes", found: Inspection) -> None:
    """The resized image under the grid of patches (thin) and cells (thick)."""
    grid, side = found.grid, found.image.pixels.shape[-1]
    axes.imshow(restored_pixels(found.image).numpy())
    for count, draw in ((grid.cols, axes.axvline), (grid.rows, axes.axhline)):
        for line in range(count + 1):
            is_cell = line % grid.ratio == 0
            draw(line * side - 0.5, color="#e07b00" if is_cell else "#ffffff",
                 linewidth=1.2 if is_cell else 0.3, alpha=0.9 if is_cell else 0.6)  # fmt: skip
    axes.set_title(
        f"{found.size[0]} x {found.size[1]} pixels, fitted into {grid.cols * side} x "
        f"{grid.rows * side}\n{grid.cols} x {grid.rows} patches in "
        f"{grid.cell_cols} x {grid.cell_rows} cells",
        fontsize=10,
    )
    axes.set_axis_off()


def _draw_tokens(axes: "Axes", found: Inspection) -> None:
    """The span in reading order: start, rows of cells with their newlines, end."""
    from matplotlib.patches import Patch, Rectangle  # noqa: PLC0415 -- an optional extra

    grid, width = found.grid, found.grid.cell_cols + 1
    shows_numbers = grid.span_length <= MAX_LABELS
    for index, kind in enumerate(grid.layout()):
        place = (0, -1)
        if kind is SpanToken.END:
            place = (width - 1, grid.cell_rows)
        elif kind is not SpanToken.START:
            place = ((index - 1) % width, (index - 1) // width)
        axes.add_patch(Rectangle(place, 0.94, 0.94, color=COLOURS[kind]))
        if shows_numbers:
            ink = "#30363d" if kind is SpanToken.IMAGE else "#ffffff"
            axes.text(place[0] + 0.47, place[1] + 0.5, str(index), ha="center", va="center",
                      fontsize=min(9, 90 / width), color=ink)  # fmt: skip
    axes.set_xlim(-0.1, width)
    axes.set_ylim(grid.cell_rows + 1.1, -1.1)
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_title(f"{grid.span_length} tokens, in reading order", fontsize=10)
    axes.legend(
        handles=[Patch(color=colour, label=kind.name.lower()) for kind, colour in COLOURS.items()],
        ncols=4, loc="upper center", bbox_to_anchor=(0.5, 0), frameon=False, fontsize=8,
    )  # fmt: skip


def _draw_experts(axes: "Axes", found: Inspection) -> None:
    """Per layer and expert: share of the image's choices less that of the text's."""
    difference = (found.image_share - found.text_share).numpy()
    reach = max(abs(difference).max(), 1e-9)
    shown = axes.imshow(difference, cmap="PuOr_r", vmin=-reach, vmax=reach, aspect="auto")
    figure = axes.get_figure()
    assert figure is not None, "axes without a figure"
    bar = figure.colorbar(shown, ax=axes, pad=0.02)
    bar.set_label("share of choices: image less text", fontsize=9)
    labels = [f"{layer}  ({value:.2f})" for layer, value in enumerate(found.overlap.tolist())]
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylabel("layer (share of choices in common)", fontsize=9)
    axes.set_xlabel("expert", fontsize=9)
    axes.set_title(
        f"Experts of {found.grid.span_length} image and {found.text_tokens} text tokens\n"
        "orange: more of the image, purple: more of the text",
        fontsize=10,
    )
