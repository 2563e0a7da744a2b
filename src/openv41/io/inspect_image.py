"""What a model makes of an image: patches, tokens, and the experts that it uses. Report §2.1.1."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from openv41.errors import InputError
from openv41.image_grid import ImageGrid
from openv41.io.image_processor import ProcessedImage, load_image, process_image
from openv41.io.tokenizer import TextTokenizer
from openv41.layers.batch import Batch
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder


@dataclass(frozen=True, eq=False)
class Inspection:
    """An image as the model gets it, and where its tokens go."""

    image: ProcessedImage
    size: tuple[int, int]  # width and height of the file's image
    text_tokens: int
    text_share: Float[Tensor, "layers E"]  # of the text's choices in a layer, per expert
    image_share: Float[Tensor, "layers E"]

    @property
    def grid(self) -> ImageGrid:
        """Patches and cells of the image."""
        return self.image.grid

    @property
    def overlap(self) -> Float[Tensor, " layers"]:
        """Share of choices that both kinds of token have in common: 1 where they use experts alike.

        Independent of the order of experts; 0 where no expert serves both.
        """
        return torch.minimum(self.text_share, self.image_share).sum(dim=1)


@torch.no_grad()
def inspect_image(
    model: CausalEncoderDecoder, tokenizer: TextTokenizer, file: Path, text: str
) -> Inspection:
    """Run BOS, the image and a text, and count which experts each kind of token chose."""
    config = model.config
    if model.vision is None or config.vision is None:
        raise InputError("the model has no vision encoder; give a checkpoint that sees images")
    opened = load_image(file)
    image = process_image(opened, config.vision)
    words = tokenizer.encode(text)
    if not words:
        raise InputError("the text is empty; give one to compare the image's experts with")
    span = [config.image_token_id] * image.grid.span_length
    embeds = model.vision(image.patches(), [image.grid])
    ids = [config.bos_token_id, *span, *words]
    counts = model(Batch.from_documents([ids], image_embeds=embeds)).expert_counts
    both = torch.stack([counts[layer] for layer in sorted(counts)]).double()  # [layers, 2, E]
    share = both / both.sum(dim=2, keepdim=True)
    return Inspection(
        image=image,
        size=opened.size,
        text_tokens=len(words) + 1,
        text_share=share[:, 0],
        image_share=share[:, 1],
    )


def restored_pixels(image: ProcessedImage) -> Tensor:
    """The resized and padded image again: [height, width, 3], uint8."""
    grid, side = image.grid, image.pixels.shape[-1]
    patches = image.pixels.view(grid.rows, grid.cols, 3, side, side)
    return patches.permute(0, 3, 1, 4, 2).reshape(grid.rows * side, grid.cols * side, 3)
