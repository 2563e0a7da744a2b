"""Sample shards: samples as token ids, weights and pixels, read through memory maps. Report §2.1.

A folder holds bare little-endian arrays: ``tokens.bin`` (ids, each image's token as often as its
span is long), ``weights.bin`` (how much each token counts in the loss), ``pixels.bin`` (uint8, the
patches of every image), ``grids.bin`` (patch rows and columns of each image) and ``samples.bin``
(tokens and images of each sample). ``index.json`` describes them; a copy of the tokenizer lies
beside it.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from openv41.config import VisionConfig
from openv41.errors import DataError
from openv41.image_grid import ImageGrid
from openv41.io.atomic import atomic_folder, write_atomic
from openv41.io.tokenizer import TextTokenizer
from openv41.train.mapped_arrays import map_array, read_index
from openv41.train.sample_encoder import EncodedSample, SampleEncoder
from openv41.train.samples import Sample

FORMAT, FORMAT_VERSION = "openv41-samples", 1
INDEX_FILE = "index.json"
ARRAYS = {"tokens": "<u4", "weights": "<f4", "pixels": "u1", "grids": "<i4", "samples": "<i8"}

logger = logging.getLogger(__name__)
Progress = Callable[[int], None]  # gets the samples done since the last call


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Content of the index file."""

    tokenizer_sha256: str
    vision: dict[str, Any] | None  # what pixels and spans depend on; None: there are no images
    text_tokens: int
    image_tokens: int
    targets: int  # tokens that are learned
    sizes: dict[str, int]  # bytes of each array
    sha256: dict[str, str]


def prepare_sample_shards(
    samples: Iterable[Sample],
    tokenizer: TextTokenizer,
    vision: VisionConfig | None,
    out: Path,
    *,
    max_tokens: int,
    progress: Progress = lambda _: None,
) -> "SampleShards":
    """Encode samples and write them; the folder appears whole or not at all.

    Without ``vision`` a sample with an image is an error. A sample of more than ``max_tokens`` is
    left out with a warning: spans and answers are never cut.
    """
    if out.exists() and any(out.iterdir()) and not _holds_samples(out):
        raise DataError(f"{out} exists and holds no sample shards; name a new or empty folder")
    encoder = SampleEncoder(tokenizer, vision)
    try:
        with atomic_folder(out.resolve()) as partial, _Writer(partial) as writer:
            for sample in samples:
                encoded = encoder.encode(sample)
                if len(encoded.tokens) <= max_tokens:
                    writer.add(encoded, encoder.image_token_id)
                else:
                    size = len(encoded.tokens)
                    logger.warning("%s has %d tokens and is left out", sample.where, size)
                progress(1)
            writer.finish(tokenizer, vision)
            tokenizer.save(partial)
    except OSError as error:
        raise DataError(f"{out}: cannot write sample shards: {error}") from None
    return SampleShards(out, verify=False)


def pixel_settings(vision: VisionConfig) -> dict[str, Any]:
    """Sizes of a vision part that decide an image's patches and span."""
    names = ("patch_size", "downsample_ratio", "max_image_tokens", "min_pixels", "max_wh_ratio")
    return {name: getattr(vision, name) for name in names}


class _Writer:
    """Appends samples to the arrays of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with ExitStack() as stack:
            opened = ((name, (folder / f"{name}.bin").open("wb")) for name in ARRAYS)
            self._files = {name: stack.enter_context(file) for name, file in opened}
            self._stack = stack.pop_all()
        self._hashes = {name: hashlib.sha256() for name in ARRAYS}
        self._text = self._image = self._targets = 0

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, sample: EncodedSample, image_token_id: int) -> None:
        """Append one sample."""
        arrays = {
            "tokens": sample.tokens,
            "weights": sample.weights,
            "pixels": sample.pixels,
            "grids": np.array([(grid.rows, grid.cols) for grid in sample.grids]),
            "samples": np.array([len(sample.tokens), len(sample.grids)]),
        }
        for name, values in arrays.items():
            data = np.ascontiguousarray(values, dtype=ARRAYS[name]).tobytes()
            self._files[name].write(data)
            self._hashes[name].update(data)
        images = int((sample.tokens == image_token_id).sum())
        self._image += images
        self._text += len(sample.tokens) - images
        self._targets += int((sample.weights > 0).sum())

    def finish(self, tokenizer: TextTokenizer, vision: VisionConfig | None) -> None:
        """Put everything on the disk, and write the index."""
        if not self._targets:
            raise DataError("the samples hold nothing to learn; give at least one that fits")
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        index = Index(
            tokenizer_sha256=tokenizer.sha256,
            vision=None if vision is None else pixel_settings(vision),
            text_tokens=self._text,
            image_tokens=self._image,
            targets=self._targets,
            sizes={name: file.tell() for name, file in self._files.items()},
            sha256={name: digest.hexdigest() for name, digest in self._hashes.items()},
        )
        content = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(index)}
        write_atomic(self._folder / INDEX_FILE, json.dumps(content, indent=1).encode() + b"\n")


class SampleShards:
    """A folder of sample shards."""

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        """Open the folder; ``verify`` reads everything once and compares the hashes."""
        self.folder = folder
        self.index = _read_index(folder / INDEX_FILE)
        index = self.index
        arrays = {
            name: map_array(
                folder / f"{name}.bin",
                dtype,
                index.sizes[name],
                index.sha256[name] if verify else None,
                "prepare the samples again",
            )
            for name, dtype in ARRAYS.items()
        }
        self._tokens, self._weights = arrays["tokens"], arrays["weights"]
        sizes = index.vision or {"downsample_ratio": 1, "patch_size": 1}
        samples, ratio = arrays["samples"].reshape(-1, 2), sizes["downsample_ratio"]
        self.lengths: list[int] = samples[:, 0].tolist()  # tokens of each sample
        self._grids = [ImageGrid(r, c, ratio) for r, c in arrays["grids"].reshape(-1, 2).tolist()]
        side = sizes["patch_size"]
        self._pixels = arrays["pixels"].reshape(-1, 3, side, side)
        self._token_bounds = _bounds(self.lengths)
        self._image_bounds = _bounds(samples[:, 1].tolist())
        self._patch_bounds = _bounds(grid.num_patches for grid in self._grids)
        ends = self._token_bounds[-1], self._image_bounds[-1], self._patch_bounds[-1]
        if ends != (len(self._tokens), len(self._grids), len(self._pixels)):
            raise DataError(f"{folder}: the arrays do not fit together; prepare the samples again")

    @property
    def needs_vision(self) -> bool:
        """Whether they were made for a model that sees."""
        return self.index.vision is not None

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.lengths)

    def pairs(self) -> list[int]:
        """Numbers of the samples of one image and a text to learn.

        Raises DataError where there are fewer than two.
        """
        images, tokens = map(pairwise, (self._image_bounds, self._token_bounds))
        found = [
            number
            for number, ((i, j), (t, u)) in enumerate(zip(images, tokens, strict=True))
            if j - i == 1 and self._weights[t:u].any()
        ]
        if len(found) < 2:
            raise DataError(
                f"{self.folder} holds {len(found)} pairs of one image and a text; comparing them "
                "needs at least 2"
            )
        return found

    def read(self, number: int) -> EncodedSample:
        """One sample."""
        first, stop = self._token_bounds[number : number + 2]
        image, last = self._image_bounds[number : number + 2]
        return EncodedSample(
            tokens=self._tokens[first:stop].astype(np.int64),
            weights=self._weights[first:stop].astype(np.float32),
            pixels=np.array(self._pixels[self._patch_bounds[image] : self._patch_bounds[last]]),
            grids=tuple(self._grids[image:last]),
        )

    def check(self, tokenizer: TextTokenizer, vision: VisionConfig | None) -> None:
        """Refuse a tokenizer or image sizes other than those that made the shards."""
        if tokenizer.sha256 != self.index.tokenizer_sha256:
            raise DataError(
                f"{self.folder} was prepared with the tokenizer of sha256 "
                f"{self.index.tokenizer_sha256}, {tokenizer.where} has {tokenizer.sha256}; "
                "prepare the samples with this tokenizer"
            )
        made = self.index.vision
        wanted = None if vision is None else pixel_settings(vision)
        if made is not None and made != wanted:
            raise DataError(
                f"{self.folder} was prepared for images of {made}, the model takes "
                f"{wanted or 'none'}; prepare the samples for this model"
            )


def _bounds(counts: Iterable[int]) -> list[int]:
    return list(accumulate(counts, initial=0))


def _holds_samples(folder: Path) -> bool:
    try:
        _read_index(folder / INDEX_FILE)
    except DataError:
        return False
    return True


def _read_index(path: Path) -> Index:
    return read_index(
        path,
        _make_index,
        format_=(FORMAT, FORMAT_VERSION),
        what="sample shards",
        remedies=(
            "make them with 'openv41 data samples', or 'openv41 data images' if they have images",
            "prepare the samples again",
        ),
    )


def _make_index(content: dict[str, Any]) -> Index:
    index = Index(**content)
    if index.sizes.keys() != ARRAYS.keys() or index.sha256.keys() != ARRAYS.keys():
        raise ValueError(f"it lists {sorted(index.sizes)}")
    if index.vision is not None:
        for name in ("patch_size", "downsample_ratio"):
            if not isinstance(size := index.vision.get(name), int) or size < 1:
                raise ValueError(f"it names no {name}")
    return index
