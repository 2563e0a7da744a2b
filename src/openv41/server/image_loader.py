"""Images of requests: from data URLs, files in the body and, where allowed, remote URLs."""

import asyncio
import base64
import binascii
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from openv41.config import VisionConfig
from openv41.errors import ImageError
from openv41.io.image_processor import ImageLimits, ProcessedImage, load_image, process_image
from openv41.server.remote import RemoteImages

DECODES = 2  # at once, of all requests together: the largest images take a GiB each
FETCHES = 8  # of one request at once; their bytes are all held until they are decoded


@dataclass(frozen=True)
class ImageSource:
    """An image of a request: where it stands, and its URL."""

    name: str
    url: str

    @property
    def is_remote(self) -> bool:
        """Whether the image is not in the URL itself."""
        return self.url[:5].lower() != "data:"


class ImageLoader:
    """Reads the images of requests; decoding and resizing run beside the event loop."""

    def __init__(
        self, limits: ImageLimits | None = None, remote: RemoteImages | None = None
    ) -> None:
        self._limits = ImageLimits() if limits is None else limits
        self._remote = remote
        self._decoders = ThreadPoolExecutor(DECODES, thread_name_prefix="image")

    async def load(
        self, sources: Sequence[ImageSource], vision: VisionConfig
    ) -> tuple[ProcessedImage, ...]:
        """Read images in their order; raises ImageError, which names the image."""
        loaded = []
        run = asyncio.get_running_loop().run_in_executor
        for start in range(0, len(sources), FETCHES):
            part = sources[start : start + FETCHES]
            for source, data in zip(part, await self._fetch_all(part), strict=True):
                loaded.append(await run(self._decoders, self._process, source, data, vision))
        return tuple(loaded)

    async def _fetch_all(self, sources: Sequence[ImageSource]) -> list[bytes | None]:
        """Bytes of the remote ones among some images; where one fails, the others are given up."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._fetch(source)) for source in sources]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _fetch(self, source: ImageSource) -> bytes | None:
        if not source.is_remote:
            return None
        if self._remote is None:
            raise ImageError(
                f"{source.name}: this server fetches no images; send a data URL, as in "
                "'data:image/png;base64,...'"
            )
        try:
            return await self._remote.fetch(source.url, self._limits.max_bytes)
        except ImageError as error:
            raise ImageError(f"{source.name}: {error}") from None

    def _process(
        self, source: ImageSource, data: bytes | None, vision: VisionConfig
    ) -> ProcessedImage:
        data = _decode(source) if data is None else data
        return process_image(load_image(data, self._limits, name=source.name), vision)


def _decode(source: ImageSource) -> bytes:
    about, comma, text = source.url.partition(",")
    if not comma or not about.lower().endswith(";base64"):
        raise ImageError(
            f"{source.name}: the data URL must be of the form 'data:image/png;base64,...'"
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"{source.name}: the data URL is no valid base64: {error}") from None
