"""Short runs of ``tiny`` on a CPU, for comparisons of training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from openv41.train.loop import Run
from openv41.train.recipes import configure


def tiny_run(
    values: Mapping[str, Any],
    out: Path,
    *,
    data: Path,
    heldout: Path | None = None,
    images: Path | None = None,
) -> Run:
    """A run with these settings."""
    words = [f"{key}={value}" for key, value in values.items()]
    model, stages, token_map = configure("tiny", data, words, images=images is not None)
    return Run(
        model=model,
        stages=stages,
        token_map=token_map,
        data=data,
        heldout=heldout,
        images=images,
        out=out,
        device=torch.device("cpu"),
    )
