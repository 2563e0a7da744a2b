"""What a training step costs: floating-point operations that the model itself asks for.

A backward pass takes twice the operations of its forward: once for the gradient of what comes in,
once for that of the weights. Layers that are run again to save memory, losses of single layers, the
optimizers and rounding do not count; nor does what attention masks out.
"""

from collections.abc import Iterable, Sequence
from math import prod

from openv41.config import VisionConfig
from openv41.image_grid import ImageGrid
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.flops import active_shapes, attention_flops, indexer_flops, stream_flops
from openv41.plan import plan_layers

PASSES = 3  # of a forward and a backward, in forwards


class TrainingFlops:
    """Operations of the steps of one model."""

    def __init__(self, model: CausalEncoderDecoder) -> None:
        self.config = model.config
        self.plans = plan_layers(model.config)
        self.head = 2 * prod(model.head.weight.shape)
        weights = (prod(s) for s in active_shapes(model).values() if len(s) > 1)
        streams = len(self.plans) * stream_flops(model.config)
        self.per_token = 2 * sum(weights) - self.head + streams

    def step(
        self,
        lengths: Sequence[int],
        *,
        num_targets: int,
        grids: Sequence[ImageGrid] = (),
        encoder_learns: bool = True,
    ) -> int:
        """Operations of a step on documents of these ``lengths``.

        The head runs for the tokens that predict one of ``num_targets``. A vision encoder that does
        not learn runs forward alone.
        """
        total = PASSES * (self.per_token * sum(lengths) + self.head * num_targets)
        contexts = [range(1, length + 1) for length in lengths]
        for plan in self.plans:
            for own in contexts:
                work = attention_flops(self.config, plan, own)
                total += PASSES * (work + indexer_flops(self.config, plan, own))
        if grids and self.config.vision is not None:
            passes = PASSES if encoder_learns else 1
            total += passes * encoder_flops(self.config.vision, grids)
            total += PASSES * projector_flops(self.config.vision, self.config.hidden_size, grids)
        return total


def encoder_flops(vision: VisionConfig, grids: Iterable[ImageGrid]) -> int:
    """Operations of the vision encoder's forward."""
    patches = [grid.num_patches for grid in grids]
    embedding = 2 * 3 * vision.patch_size**2 * vision.hidden_size
    return embedding * sum(patches) + block_flops(vision, patches)


def block_flops(vision: VisionConfig, lengths: Iterable[int]) -> int:
    """Operations of the encoder's blocks, over the patches of images or the tokens of texts."""
    width = vision.hidden_size
    weights = 4 * width**2 + 3 * width * vision.intermediate_size
    return sum(vision.num_layers * (2 * weights * n + 4 * width * n**2) for n in lengths)


def projector_flops(vision: VisionConfig, hidden_size: int, grids: Iterable[ImageGrid]) -> int:
    """Operations of the projector's forward."""
    merged = vision.hidden_size * vision.downsample_ratio**2
    cells = sum(grid.cell_rows * grid.cell_cols for grid in grids)
    return 2 * cells * (merged * hidden_size + hidden_size**2)
