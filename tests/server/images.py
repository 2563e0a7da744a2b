"""Random images, as requests hold them."""

import base64
import io

import torch
from PIL import Image


def png(seed, width=12, height=6):
    """Bytes of a random image."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), pixels.numpy().tobytes()).save(file, "PNG")
    return file.getvalue()


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data):
    return {"type": "image_url", "image_url": {"url": data_url(data)}}
