"""From an image file to patches: the released resizing, padding and scaling. Report §2.1.1.

Pillow, the extra ``[vision]``, decodes and resizes. An image's size is read from its header and
checked before its pixels are decoded, since a file of 100 kB may hold as many as a large one:
decoding takes up to 8 bytes a pixel, 16 for WEBP (measured; 1 GiB at the default limit).
"""

import hashlib
import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import BFloat16, UInt8
from torch import Tensor

from openv41.config import VisionConfig
from openv41.errors import ConfigError, ImageError
from openv41.image_grid import ImageGrid, grid_of, is_squeezed

if TYPE_CHECKING:
    from PIL import Image

GREY = (127, 127, 127)
HASH_BYTES = 32
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow's others run more code on input
MAX_PIXELS = 89_478_485  # Pillow warns above, and refuses twice as many
STRIP_PIXELS = 1 << 20  # of a 16-bit image that are narrowed at once
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N")
_TOO_WIDE = ("F", "I")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageLimits:
    """What an image may be at most; all of it is known before a pixel is decoded."""

    max_bytes: int = 32 << 20
    max_pixels: int = 1 << 26
    max_aspect: float = 5000.0  # longer side over the shorter one

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)}, must be at least 1"
            for name in ("max_bytes", "max_pixels", "max_aspect")
            if not getattr(self, name) >= 1
        ]
        if self.max_pixels > MAX_PIXELS:
            problems.append(f"max_pixels is {self.max_pixels}, must be at most {MAX_PIXELS}")
        if problems:
            raise ConfigError("image limits", problems)


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """An image as the vision encoder takes it."""

    pixels: UInt8[Tensor, "patches 3 side side"]  # RGB, patches in reading order
    grid: ImageGrid

    @cached_property
    def content_hash(self) -> bytes:
        """Digest of the pixels and their grid: equal for equal inputs of the vision encoder."""
        shape = f"{self.grid.rows} {self.grid.cols} {self.grid.ratio}".encode()
        data = self.pixels.contiguous().numpy().tobytes()
        return hashlib.blake2b(data, key=shape, digest_size=HASH_BYTES).digest()

    def patches(self) -> BFloat16[Tensor, "patches 3 side side"]:
        """Pixels from -1 to 1."""
        return scale_pixels(self.pixels)


def scale_pixels(
    pixels: UInt8[Tensor, "patches 3 side side"],
) -> BFloat16[Tensor, "patches 3 side side"]:
    """Map 0..255 to -1..1, in float32 and rounded once."""
    return ((pixels.to(torch.float32) / 255 - 0.5) / 0.5).to(torch.bfloat16)


def load_image(
    source: bytes | Path, limits: ImageLimits = ImageLimits(), *, name: str = ""
) -> "Image.Image":
    """Read an image, upright, as RGB.

    EXIF orientation is applied, alpha is dropped, 16 bits become 8; of an animation the first frame
    is taken. Raises ImageError, which names the image, for what cannot be read or is beyond the
    limits.
    """
    name = name or (str(source) if isinstance(source, Path) else "the image")
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415 -- an optional extra
    except ImportError:
        raise ImageError(f"{name}: images need Pillow; pip install 'openv41[vision]'") from None
    data = _read(source, name, limits)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(image.size, name, limits)
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return _as_rgb(image, name)
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError(
            f"{name}: has more than the {limits.max_pixels:,} pixels allowed; scale it down"
        ) from None
    except Exception as error:  # decoders of broken files raise almost anything
        is_known = not isinstance(error, UnidentifiedImageError)  # whose text names an address
        reason = f" ({type(error).__name__}: {error})" if is_known else ""
        raise ImageError(
            f"{name}: cannot be read as an image{reason}; give a {', '.join(FORMATS[:-1])} or "
            f"{FORMATS[-1]} file"
        ) from None


def process_image(image: "Image.Image", vision: VisionConfig) -> ProcessedImage:
    """Fit an RGB image into the size that its grid has, on grey, and cut it into patches.

    Inner size and corner are those of Pillow's ``ImageOps.pad``, rounded half to even.
    """
    from PIL import Image  # noqa: PLC0415 -- an optional extra

    grid, side = grid_of(*image.size, vision), vision.patch_size
    size = (grid.cols * side, grid.rows * side)
    inner = size if is_squeezed(*image.size, vision) else _inner_size(image.size, size)
    fitted = Image.new("RGB", size, GREY)
    corner = (round((size[0] - inner[0]) * 0.5), round((size[1] - inner[1]) * 0.5))
    fitted.paste(image.resize(inner, Image.Resampling.BICUBIC), corner)
    flat = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    pixels = flat.view(grid.rows, side, grid.cols, side, 3).permute(0, 2, 4, 1, 3)
    return ProcessedImage(pixels.reshape(-1, 3, side, side).contiguous(), grid)


def _inner_size(size: tuple[int, int], padded: tuple[int, int]) -> tuple[int, int]:
    """The largest size of the image's aspect inside the padded one, at least one pixel thick."""
    (width, height), (padded_width, padded_height) = size, padded
    if width / height > padded_width / padded_height:
        return padded_width, max(1, round(height / width * padded_width))
    return max(1, round(width / height * padded_height)), padded_height


def _read(source: bytes | Path, name: str, limits: ImageLimits) -> bytes:
    if isinstance(source, Path):
        try:
            with source.open("rb") as file:
                source = file.read(limits.max_bytes + 1)
        except (OSError, ValueError) as error:  # ValueError: no name of a file
            reason = error.strerror if isinstance(error, OSError) else error
            raise ImageError(f"{name}: cannot be read: {reason}") from None
    if len(source) > limits.max_bytes:
        raise ImageError(
            f"{name}: has more than the {limits.max_bytes:,} bytes allowed; compress it or scale "
            "it down"
        )
    return source


def _check_size(size: tuple[int, int], name: str, limits: ImageLimits) -> None:
    width, height = size
    found = f"{name}: is {width:,} x {height:,} pixels"
    if min(size) < 1:
        raise ImageError(f"{found}; give an image with at least one")
    if width * height > limits.max_pixels:
        raise ImageError(f"{found}, more than the {limits.max_pixels:,} allowed; scale it down")
    if max(size) > limits.max_aspect * min(size):
        raise ImageError(
            f"{found}: the longer side may be at most {limits.max_aspect:g} times the shorter; "
            "crop it"
        )


def _as_rgb(image: "Image.Image", name: str) -> "Image.Image":
    if image.mode in _TOO_WIDE:
        raise ImageError(f"{name}: has 32 bits per sample; save it with 8 or 16")
    if image.mode in _SIXTEEN_BITS:
        image = _to_8_bits(image)
    image.info.pop("transparency", None)  # a colour that counts as clear stays a colour
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_8_bits(image: "Image.Image") -> "Image.Image":
    """Scale 16-bit grey to 8 bits, rounded; Pillow's own conversion clips it."""
    from PIL import Image  # noqa: PLC0415 -- an optional extra

    width, height = image.size
    narrow, rows = Image.new("L", image.size), max(1, STRIP_PIXELS // width)
    for top in range(0, height, rows):
        strip = image.crop((0, top, width, min(top + rows, height))).convert("I")
        wide = torch.frombuffer(bytearray(strip.tobytes()), dtype=torch.int32)
        data = (wide / 257).round().to(torch.uint8).numpy().tobytes()
        narrow.paste(Image.frombytes("L", strip.size, data), (0, top))
    return narrow
