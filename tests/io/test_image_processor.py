"""Image files to patches: golden bits, every pixel format, limits, and files that are none."""

import builtins
import io
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from openv41.config import VisionConfig
from openv41.errors import ConfigError, ImageError
from openv41.image_grid import ImageGrid
from openv41.io import image_processor
from openv41.io.hf_config import read_config
from openv41.io.image_processor import (
    MAX_PIXELS,
    ImageLimits,
    ProcessedImage,
    load_image,
    process_image,
)
from openv41.io.tensor_files import read_tensors
from openv41.presets import released

RELEASED = released().vision
SMALL = VisionConfig(
    num_layers=1,
    hidden_size=8,
    num_heads=1,
    intermediate_size=8,
    patch_size=4,
    downsample_ratio=2,
    max_image_tokens=60,
    min_pixels=64,
)


def encoded(image, file_format="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def noise(width, height, channels=3):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def pixels_of(image):
    return np.asarray(image)


@pytest.mark.golden
@pytest.mark.parametrize("letter", ["A", "B"])
def test_golden_patches_bit_for_bit(golden_dir, letter):
    folder = golden_dir / letter
    inputs = read_tensors(folder / "inputs.safetensors")
    vision = read_config(folder / "checkpoint").vision
    for k, (rows, cols) in enumerate(inputs["image_grids_vit"].tolist()):
        found = process_image(load_image(folder / f"image{k}.png"), vision)
        assert (found.grid.rows, found.grid.cols) == (rows, cols)
        cells = inputs["image_grids_llm"][k].tolist()
        assert [found.grid.cell_rows, found.grid.cell_cols] == cells
        if f"image{k}.patches" in inputs:  # the last image tests sizes alone
            assert torch.equal(found.patches(), inputs[f"image{k}.patches"])


sides = st.one_of(st.integers(1, 30), st.integers(1, 300))


@pytest.mark.property
@given(sides, sides)
def test_fitting_is_pillows_own(width, height):
    image = Image.fromarray(noise(width, height))
    found = process_image(image, SMALL)
    side, grid = SMALL.patch_size, found.grid
    size = (grid.cols * side, grid.rows * side)
    want = np.asarray(ImageOps.pad(image, size, color=(127, 127, 127)))
    for patch, (row, col) in zip(found.pixels, np.ndindex(grid.rows, grid.cols), strict=True):
        own = want[row * side : (row + 1) * side, col * side : (col + 1) * side]
        assert np.array_equal(patch.permute(1, 2, 0).numpy(), own)


@pytest.mark.parametrize(
    ("size", "tokens"), [((1, 1), 184), ((1, 4000), 1024), ((4000, 1), 823), ((300, 500), None)]
)
def test_any_shape_fills_its_grid(size, tokens):
    found = process_image(Image.new("RGB", size, (255, 0, 0)), RELEASED)
    assert found.pixels.shape == (found.grid.num_patches, 3, 14, 14)
    assert tokens in (None, found.grid.span_length)
    colours = found.pixels.permute(0, 2, 3, 1).reshape(-1, 3).unique(dim=0).tolist()
    assert [255, 0, 0] in colours  # also where the image is thinner than its grid


def test_a_shape_too_thin_for_its_grid_keeps_one_pixel():
    found = process_image(Image.new("RGB", (1, 4000)), SMALL)
    assert (found.pixels == 0).any()


def test_squeezed_beyond_the_ratio_of_the_config():
    squeezing = VisionConfig(
        num_layers=1, hidden_size=8, num_heads=1, intermediate_size=8, max_wh_ratio=2.0
    )
    found = process_image(Image.new("RGB", (3000, 500)), squeezing)
    assert (found.pixels == 0).all()  # no grey bar


def test_scaling_is_rounded_once():
    values = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    found = ProcessedImage(values.contiguous(), ImageGrid(1, 1, 3)).patches()
    want = ((np.arange(256, dtype=np.float32) / np.float32(255)) - np.float32(0.5)) / 0.5
    assert found.dtype == torch.bfloat16
    assert torch.equal(found[0, 1].flatten(), torch.from_numpy(want).to(torch.bfloat16))


RGB = noise(6, 5)


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "BMP", "TIFF"])
def test_lossless_formats(file_format):
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = encoded(Image.fromarray(RGB), file_format, **options)
    assert np.array_equal(pixels_of(load_image(data)), RGB)


def test_alpha_is_dropped_not_blended():
    rgba = np.dstack([RGB, np.zeros_like(RGB[..., :1])])
    assert np.array_equal(pixels_of(load_image(encoded(Image.fromarray(rgba)))), RGB)
    grey = np.dstack([RGB[..., 0], np.full_like(RGB[..., 0], 9)])
    found = pixels_of(load_image(encoded(Image.fromarray(grey, "LA"))))
    assert np.array_equal(found, np.repeat(RGB[..., :1], 3, axis=2))


@pytest.mark.parametrize("transparency", [None, 3, bytes(range(0, 160, 10))])
def test_palette(transparency):
    image = Image.fromarray(RGB[..., 0] % 16, "P")
    colours = noise(16, 1)[0]
    image.putpalette(colours.flatten().tolist())
    options = {} if transparency is None else {"transparency": transparency}
    found = pixels_of(load_image(encoded(image, **options)))
    assert np.array_equal(found, colours[RGB[..., 0] % 16])


def test_a_clear_colour_stays_a_colour():
    colour = tuple(RGB[2, 3].tolist())
    data = encoded(Image.fromarray(RGB), transparency=colour)
    assert np.array_equal(pixels_of(load_image(data)), RGB)


def test_black_and_white_and_grey():
    assert pixels_of(load_image(encoded(Image.new("1", (2, 2), 1)))).tolist()[0][0] == [255] * 3
    found = pixels_of(load_image(encoded(Image.fromarray(RGB[..., 1]))))
    assert np.array_equal(found, np.repeat(RGB[..., 1:2], 3, axis=2))


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(file_format):
    wide = np.array([[0, 128, 129, 257, 32768, 65407, 65408, 65535]], dtype=np.uint16)
    found = pixels_of(load_image(encoded(Image.fromarray(wide), file_format)))
    assert found[0, :, 0].tolist() == [0, 0, 1, 1, 128, 255, 255, 255]
    assert (found == found[..., :1]).all()


def test_sixteen_bits_are_narrowed_strip_by_strip(monkeypatch):
    """Never the whole image at 4 bytes a pixel, and no seam is to be seen."""
    wide = np.arange(7 * 50, dtype=np.uint16).reshape(7, 50) * 187
    strips, convert = [], Image.Image.convert
    monkeypatch.setattr(
        Image.Image,
        "convert",
        lambda self, mode: strips.append((self.size, mode)) or convert(self, mode),
    )
    monkeypatch.setattr(image_processor, "STRIP_PIXELS", 120)
    found = load_image(encoded(Image.fromarray(wide)))
    assert [size for size, mode in strips if mode == "I"] == [(50, 2)] * 3 + [(50, 1)]
    assert np.array_equal(pixels_of(found)[..., 0], np.round(wide / 257))


def test_what_is_no_image_is_told_alike_each_time():
    text = "^scan: cannot be read as an image; give a PNG, JPEG, WEBP, GIF, BMP or TIFF file$"
    with pytest.raises(ImageError, match=text):
        load_image(b"no image", name="scan")


def test_a_name_that_is_none():
    with pytest.raises(ImageError, match="cannot be read: embedded null byte"):
        load_image(Path("a\0b"))


def test_sixteen_bits_of_colour():
    """Pillow keeps the high byte."""
    rows = b"\0" + struct.pack(">6H", 0x1234, 0xFF00, 0, 0xABCD, 255, 65535)
    header = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    data = png_of((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    assert pixels_of(load_image(data)).tolist() == [[[0x12, 0xFF, 0], [0xAB, 0, 255]]]


def png_of(*chunks):
    parts = [b"\x89PNG\r\n\x1a\n"]
    for kind, body in chunks:
        check = struct.pack(">I", zlib.crc32(kind + body))
        parts += [struct.pack(">I", len(body)), kind, body, check]
    return b"".join(parts)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_thirty_two_bits_are_refused(mode):
    data = encoded(Image.new(mode, (2, 2)), "TIFF")
    with pytest.raises(ImageError, match=r"^scan: has 32 bits per sample; save it with 8 or 16"):
        load_image(data, name="scan")


def test_cmyk():
    inks = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    found = pixels_of(load_image(encoded(inks, "TIFF")))
    assert found[0, 0].tolist() == [255, 0, 0]
    found = pixels_of(load_image(encoded(inks, "JPEG", quality=95)))
    assert np.abs(found.astype(int) - [255, 0, 0]).max() < 8


def test_the_first_frame_of_an_animation():
    frames = [Image.new("RGB", (4, 3), colour) for colour in ("red", "blue", "lime")]
    options = {"save_all": True, "append_images": frames[1:]}
    for data in (
        encoded(frames[0], "GIF", **options),
        encoded(frames[0], "PNG", **options),
        encoded(frames[0], "WEBP", lossless=True, **options),
        encoded(frames[0], "TIFF", **options),
    ):
        assert (pixels_of(load_image(data)) == [255, 0, 0]).all()


TURNS = {  # where the pixel of the stored top left corner is seen
    1: "top left",
    2: "top right",
    3: "bottom right",
    4: "bottom left",
    5: "top left",
    6: "top right",
    7: "bottom right",
    8: "bottom left",
}


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
def test_exif_orientation(orientation, file_format):
    stored = np.zeros((32, 64, 3), dtype=np.uint8)
    stored[:16, :16] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = load_image(encoded(Image.fromarray(stored), file_format, exif=exif))
    assert found.size == ((64, 32) if orientation < 5 else (32, 64))
    bright = {
        f"{y} {x}"
        for y, row in (("top", 4), ("bottom", found.height - 5))
        for x, column in (("left", 4), ("right", found.width - 5))
        if found.getpixel((column, row))[0] > 128
    }
    assert bright == {TURNS[orientation]}


def test_the_hash_follows_the_pixels_and_the_grid():
    image = Image.fromarray(RGB)
    one, same = (process_image(load_image(encoded(image, f)), SMALL) for f in ("PNG", "BMP"))
    assert one.content_hash == same.content_hash
    assert len(one.content_hash) == 32
    other = RGB.copy()
    other[0, 0, 0] ^= 255
    assert process_image(Image.fromarray(other), SMALL).content_hash != one.content_hash
    pixels = torch.zeros(6, 3, 4, 4, dtype=torch.uint8)
    grids = ImageGrid(2, 3, 2), ImageGrid(3, 2, 2), ImageGrid(2, 3, 3)
    assert len({ProcessedImage(pixels, grid).content_hash for grid in grids}) == 3


def test_a_file_is_named_in_errors(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(encoded(Image.fromarray(RGB)))
    assert np.array_equal(pixels_of(load_image(path)), RGB)
    path.write_bytes(b"no image")
    with pytest.raises(ImageError, match=re.escape(f"{path}: cannot be read as an image; give")):
        load_image(path)
    with pytest.raises(ImageError, match=re.escape(f"{tmp_path / 'x'}: cannot be read: No such f")):
        load_image(tmp_path / "x")
    with pytest.raises(ImageError, match=re.escape(f"{tmp_path}: cannot be read: Is a directory")):
        load_image(tmp_path)


PNG, JPEG = encoded(Image.fromarray(noise(40, 30))), encoded(Image.fromarray(RGB), "JPEG")


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"GIF89a", PNG[:-40], PNG[:100], PNG[:20], JPEG[:100], b"%!PS-Adobe-3.0 EPSF-3.0"],
)
def test_what_is_no_image_is_named(data):
    with pytest.raises(ImageError, match=r"^picture 3: cannot be read as an image.* or TIFF file"):
        load_image(data, name="picture 3")


@pytest.mark.property
@given(st.integers(0, len(PNG) - 1), st.integers(1, 255))
def test_a_changed_byte_gives_an_image_or_an_image_error(place, change):
    data = bytearray(PNG)
    data[place] ^= change
    try:
        assert load_image(bytes(data)).mode == "RGB"
    except ImageError as error:
        assert str(error).startswith("the image: ")  # noqa: PT017 -- either outcome is right


def test_postscript_is_never_run():
    assert "EPS" not in image_processor.FORMATS
    ppm = encoded(Image.fromarray(RGB), "PPM")
    with pytest.raises(ImageError, match="give a PNG, JPEG, WEBP, GIF, BMP or TIFF file"):
        load_image(ppm)


def bomb(width, height):
    """A PNG of a few bytes whose header claims a size; it has no pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return png_of((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((8193, 8192), "is 8,193 x 8,192 pixels, more than the 67,108,864 allowed; scale it"),
        ((10_000, 10_000), "has more than the 67,108,864 pixels allowed"),
        ((60_000, 60_000), "has more than the 67,108,864 pixels allowed"),
        ((5001, 1), "is 5,001 x 1 pixels: the longer side may be at most 5000 times the sh"),
        ((2, 10_001), "is 2 x 10,001 pixels: the longer side may be at most 5000 times the"),
    ],
)
def test_sizes_are_checked_before_pixels_are_decoded(size, message, monkeypatch):
    def load(_):
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", load)
    with pytest.raises(ImageError, match=f"^bomb: {re.escape(message)}"):
        load_image(bomb(*size), name="bomb")


def test_limits_are_settings():
    data = encoded(Image.fromarray(RGB))
    tight = ImageLimits(max_bytes=len(data), max_pixels=30, max_aspect=1.2)
    assert load_image(data, tight).size == (6, 5)
    for setting, message in (
        ({"max_bytes": len(data) - 1}, rf"more than the {len(data) - 1} bytes allowed; compress"),
        ({"max_pixels": 29}, r"is 6 x 5 pixels, more than the 29 allowed"),
        ({"max_aspect": 1.1}, r"longer side may be at most 1\.1 times the shorter; crop it"),
    ):
        with pytest.raises(ImageError, match=message):
            load_image(data, ImageLimits(**setting))


def test_a_large_file_is_not_read_whole(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole
    with pytest.raises(ImageError, match="more than the 1,000 bytes allowed"):
        load_image(path, ImageLimits(max_bytes=1000))


def test_limits_that_cannot_be():
    with pytest.raises(ConfigError, match="max_bytes is 0, must be at least 1") as caught:
        ImageLimits(max_bytes=0, max_pixels=MAX_PIXELS + 1)
    assert caught.value.problems[1] == "max_pixels is 89478486, must be at most 89478485"


def test_without_pillow(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "PIL":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImageError, match=re.escape("pip install 'openv41[vision]'")):
        load_image(PNG)
