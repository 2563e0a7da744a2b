"""The reliability diagram of a drafter's confidences."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from openv41.engine.calibration import confidences
from openv41.engine.verification_scheduler import survival
from openv41.errors import InputError
from openv41.io.atomic import atomic_path
from openv41.reliability import binned, reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AREA = 400.0  # of the largest point, in square points


def draw_reliability(
    logits: Float[np.ndarray, "rounds X"],
    accepted: Int[np.ndarray, " rounds"],
    temperatures: Float[np.ndarray, " X"],
    out: Path,
) -> None:
    """Draw the share of drafts that survived over what was predicted, before and after."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 -- an optional extra
    except ImportError:
        raise InputError("the picture needs matplotlib; pip install 'openv41[plot]'") from None
    figure = Figure(figsize=(9, 4.6), dpi=140, layout="constrained")
    panels = zip(
        figure.subplots(1, 2, sharey=True),
        ("as the head says", "with temperatures"),
        (np.ones_like(temperatures), temperatures),
        strict=True,
    )
    for axes, title, used in panels:
        _draw_panel(axes, survival(confidences(logits, used)), accepted)
        axes.set(title=title, xlabel="predicted survival", xlim=(0, 1), ylim=(0, 1))
    figure.axes[0].set_ylabel("share that survived")
    figure.axes[1].legend(title="draft", loc="upper left")
    with atomic_path(out) as temporary:
        figure.savefig(temporary, format="png")


def _draw_panel(
    axes: "Axes", predicted: Float[np.ndarray, "rounds X"], accepted: Int[np.ndarray, " rounds"]
) -> None:
    axes.plot([0, 1], [0, 1], color="#9aa4af", linewidth=1)
    for place, column in enumerate(predicted.T):
        bins = reliability(binned(column, accepted > place))
        axes.scatter(
            [found.predicted for found in bins],
            [found.happened for found in bins],
            s=[4 + AREA * found.share for found in bins],
            alpha=0.7,
            label=str(place + 1),
        )
