"""Stage ``vision``: images and texts in one space, by a sigmoid contrastive loss. Report §2.1.1.

The report trains its encoder in the manner of SigLIP and says nothing of the other tower. Ours is
as deep and wide as the encoder: its blocks, over the tokens of a text in a line. An image or a text
is the mean of its tokens, projected. Only the encoder outlives the stage.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from openv41 import ops
from openv41.config import NUMERICS, ModelConfig, NumericsConfig, VisionConfig
from openv41.image_grid import ImageGrid
from openv41.io.image_processor import scale_pixels
from openv41.layers.embedding import Embedding
from openv41.layers.factory import Factory
from openv41.layers.quantized_linear import Linear, RMSNorm
from openv41.layers.vision_encoder import EPS, VisionBlock, VisionEncoder
from openv41.model.init import init_weights
from openv41.train.packed_batch import PackedBatch

FIRST_TEMPERATURE, FIRST_BIAS = 10.0, -10.0  # SigLIP's


def sigmoid_contrastive_loss(
    images: Float[Tensor, "images width"],
    texts: Float[Tensor, "texts width"],
    log_temperature: Float[Tensor, ""],
    bias: Float[Tensor, ""],
    *,
    first: int = 0,
) -> Float[Tensor, ""]:
    """Mean over images i of -sum over texts j of log sigmoid(z_ij logit_ij).

    The own text of image i is ``first + i``: there z is 1, elsewhere -1. The texts may be those of
    several processes; with as many images in each, the mean over the processes is the whole loss.
    """
    logits = pair_logits(images, texts, log_temperature, bias)
    own = torch.arange(len(images), device=images.device)
    signs = torch.full_like(logits, -1.0)
    signs[own, first + own] = 1.0
    return -F.logsigmoid(signs * logits).sum() / len(images)


def pair_logits(
    images: Float[Tensor, "images width"],
    texts: Float[Tensor, "texts width"],
    log_temperature: Float[Tensor, ""],
    bias: Float[Tensor, ""],
) -> Float[Tensor, "images texts"]:
    """exp(log_temperature) cos(image, text) + bias."""
    cosines = F.normalize(images, dim=1) @ F.normalize(texts, dim=1).T
    return log_temperature.exp() * cosines + bias


class TextTower(nn.Module):
    """Encodes texts, each token with both of its sides."""

    def __init__(
        self,
        vocab_size: int,
        vision: VisionConfig,
        numerics: NumericsConfig,
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.vision = vision
        self.embed = Embedding(vocab_size, vision.hidden_size, **made)
        self.blocks = nn.ModuleList(
            VisionBlock(vision, numerics, **made) for _ in range(vision.num_layers)
        )
        self.norm = RMSNorm(vision.hidden_size, EPS, **made)

    def forward(self, ids: Int[Tensor, " T"], lengths: Sequence[int]) -> Float[Tensor, "T width"]:
        """Encode texts that lie one behind the other; a text is an image one patch high."""
        vision, x = self.vision, F.embedding(ids, self.embed.weight)
        head_dim = vision.hidden_size // vision.num_heads
        angles = [ops.rope_angles_2d(1, n, head_dim, vision.rope_theta, x.device) for n in lengths]
        table = torch.cat(angles)
        for block in self.blocks:
            x = block(x, table, lengths)
        encoded: Tensor = self.norm(x)
        return encoded


class Side(nn.Module):
    """From the tokens of images, or of texts, to one feature of each."""

    def __init__(
        self, encoder: nn.Module, width: int, numerics: NumericsConfig, **made: Unpack[Factory]
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection = Linear(width, width, numerics, **made)

    def forward(
        self,
        tokens: Shaped[Tensor, "tokens ..."],
        layout: Sequence[ImageGrid] | Sequence[int],
        lengths: Sequence[int],
    ) -> Float[Tensor, "items width"]:
        """Project the mean over each item's tokens; ``layout`` is the encoder's second argument."""
        encoded = self.encoder(tokens, layout)
        means = [own.mean(dim=0) for own in encoded.split(list(lengths))]
        feature: Tensor = self.projection(torch.stack(means))
        return feature


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Images, and the text of each."""

    pixels: UInt8[Tensor, "patches 3 side side"]
    grids: tuple[ImageGrid, ...]
    ids: Int[Tensor, " T"]
    lengths: tuple[int, ...]  # of the texts

    @classmethod
    def of(cls, packed: PackedBatch) -> "Pairs":
        """What a batch of documents holds, each with one image: its text is what is learned."""
        pixels, weights = packed.pixels, packed.weights
        assert pixels is not None, "documents without an image"
        assert weights is not None, "documents that are text alone"
        learned = weights > 0
        assert all(len(grids) == 1 for grids in packed.grids), "a document with several images"
        lengths = tuple(int(own.sum()) for own in learned.split(list(packed.lengths)))
        return cls(pixels, packed.images, packed.ids[learned], lengths)


class ContrastiveModel(nn.Module):
    """The vision encoder, under the name it has in the whole model, beside a text tower."""

    def __init__(
        self,
        config: ModelConfig,
        numerics: NumericsConfig = NUMERICS["f32"],
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        vision = config.vision
        assert vision is not None, "a contrastive model without a vision encoder"
        self.config, width = config, vision.hidden_size
        self.vision = Side(VisionEncoder(vision, numerics, **made), width, numerics, **made)
        text = TextTower(config.vocab_size, vision, numerics, **made)
        self.text = Side(text, width, numerics, **made)
        self.log_temperature = nn.Parameter(torch.empty((), **made))
        self.bias = nn.Parameter(torch.empty((), **made))

    @torch.no_grad()
    def init(self, seed: int) -> None:
        """Fill every parameter; the values depend on the seed and the shapes alone."""
        init_weights(self, seed)
        self.log_temperature.fill_(math.log(FIRST_TEMPERATURE))
        self.bias.fill_(FIRST_BIAS)

    def forward(
        self, pairs: Pairs
    ) -> tuple[Float[Tensor, "items width"], Float[Tensor, "items width"]]:
        """Features of the images and of their texts."""
        device = self.bias.device
        patches = scale_pixels(pairs.pixels.to(device))
        images = self.vision(patches, pairs.grids, [grid.num_patches for grid in pairs.grids])
        return images, self.text(pairs.ids.to(device), pairs.lengths, pairs.lengths)


def retrieval_accuracy(
    images: Float[Tensor, "images width"], texts: Float[Tensor, "images width"], pairs: Pairs
) -> float:
    """Share of the images whose nearest text of the batch is their own, or reads the same."""
    nearest = (F.normalize(images, dim=1) @ F.normalize(texts, dim=1).T).argmax(dim=1).tolist()
    words = [tuple(own.tolist()) for own in pairs.ids.split(list(pairs.lengths))]
    found = [bool(words[place] == own) for place, own in zip(nearest, words, strict=True)]
    return sum(found) / len(found)
