"""Images of requests: from data URLs, files in the body and, where allowed, remote URLs."""

import asyncio
import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass

from openv41.config import VisionConfig
from openv41.errors import ImageError
from openv41.io.image_processor import ImageLimits, ProcessedImage, load_image, process_image
from openv41.server.remote import RemoteImages


@dataclass(frozen=True)
class Picture:
    """An image of a request: where it stands, and its URL."""

    name: str
    url: str


class Pictures:
    """Reads the images of requests; decoding and resizing run beside the event loop."""

    def __init__(
        self, limits: ImageLimits | None = None, remote: RemoteImages | None = None
    ) -> None:
        self._limits = ImageLimits() if limits is None else limits
        self._remote = remote

    async def load(
        self, pictures: Sequence[Picture], vision: VisionConfig
    ) -> tuple[ProcessedImage, ...]:
        """Read images in their order; raises ImageError, which names the image."""
        loaded = []
        for picture in pictures:
            data: bytes | None = None
            if picture.url[:5].lower() != "data:":
                data = await self._fetch(picture)
            loaded.append(await asyncio.to_thread(self._process, picture, data, vision))
        return tuple(loaded)

    async def _fetch(self, picture: Picture) -> bytes:
        if self._remote is None:
            raise ImageError(
                f"{picture.name}: this server fetches no images; send a data URL, as in "
                "'data:image/png;base64,...'"
            )
        try:
            return await self._remote.fetch(picture.url, self._limits.max_bytes)
        except ImageError as error:
            raise ImageError(f"{picture.name}: {error}") from None

    def _process(
        self, picture: Picture, data: bytes | None, vision: VisionConfig
    ) -> ProcessedImage:
        data = _decode(picture) if data is None else data
        return process_image(load_image(data, self._limits, name=picture.name), vision)


def _decode(picture: Picture) -> bytes:
    about, comma, text = picture.url.partition(",")
    if not comma or not about.lower().endswith(";base64"):
        raise ImageError(
            f"{picture.name}: the data URL must be of the form 'data:image/png;base64,...'"
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"{picture.name}: the data URL is no valid base64: {error}") from None
