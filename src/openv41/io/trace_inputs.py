"""What a trace starts from: the tokens and images of an inputs file. Report §2.1."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openv41.errors import InputError
from openv41.io.tensor_files import read_tensors


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageInputs:
    """A text with images: ids with expanded spans, and each image's patches."""

    ids: Int[Tensor, " S"]
    patches: Float[Tensor, "patches 3 side side"]  # of all images, one after the other
    sizes: tuple[tuple[int, int], ...]  # rows and columns of patches, per image

    @classmethod
    def of(cls, found: Mapping[str, Tensor], path: Path) -> "ImageInputs":
        """Take the image case out of an inputs file."""
        names = takewhile(lambda name: name in found, (f"image{k}.patches" for k in count()))
        patches = [found[name] for name in names]
        grids = found.get("image_grids_vit", torch.empty(0, 2)).tolist()[: len(patches)]
        counts = [len(own) for own in patches]
        if not patches or [rows * cols for rows, cols in grids] != counts:
            raise InputError(
                f"{path}: image_ids need image0.patches and so on, and image_grids_vit with rows x "
                f"columns of each; found {len(patches)} images of {counts} patches, grids {grids}"
            )
        sizes = tuple((rows, cols) for rows, cols in grids)
        return cls(ids=found["image_ids"].long(), patches=torch.cat(patches), sizes=sizes)


@dataclass(frozen=True, eq=False, kw_only=True)
class Inputs:
    """Tokens of every case, as an inputs file holds them."""

    text_ids: Int[Tensor, " S"]
    prefill_len: int
    subset_positions: Int[Tensor, " _"]  # rows kept of wide per-layer tensors
    batch_ids: Int[Tensor, "B T"]
    images: "ImageInputs | None" = None

    @classmethod
    def read(cls, path: Path) -> "Inputs":
        """Read and check an inputs file; tensors of other cases are ignored."""
        found = read_tensors(path)
        names = ("text_ids", "prefill_len", "subset_positions", "batch_ids")
        if missing := [name for name in names if name not in found]:
            raise InputError(
                f"{path}: no tensor {', '.join(missing)}; an inputs file has {', '.join(names)}"
            )
        text, rows = found["text_ids"].long(), found["subset_positions"].long()
        prefill_len = int(found["prefill_len"].flatten()[0])
        if not 0 < prefill_len < len(text):
            raise InputError(f"{path}: prefill_len is {prefill_len}, must be in 1..{len(text) - 1}")
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(text):
            raise InputError(f"{path}: subset_positions must be rows of the {len(text)} text_ids")
        return cls(
            text_ids=text,
            prefill_len=prefill_len,
            subset_positions=rows,
            batch_ids=found["batch_ids"].long(),
            images=ImageInputs.of(found, path) if "image_ids" in found else None,
        )
