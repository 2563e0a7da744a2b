"""One optimizer step: loss, gradients, clipping, update, load balance. Report §2.5."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from openv41.errors import OpenV41Error
from openv41.io.image_processor import scale_pixels
from openv41.layers.batch import Batch
from openv41.layers.objectives import Losses
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.train.balance import update_biases
from openv41.train.config import TrainConfig
from openv41.train.data import PackedBatch
from openv41.train.optimizer import Optimizers
from openv41.train.schedule import lr_factor

LOGITS_AT_ONCE = 1 << 22  # logits that are alive at a time: 16 MB


class DivergedError(OpenV41Error):
    """A loss or gradient that is not finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step measured."""

    loss: float  # nats per target, of the language model alone
    indexer_loss: float | None  # these two before their weights; None where turned off
    balance_loss: float | None
    grad_norm: float  # before clipping
    lr: float
    loads: Mapping[int, Int[Tensor, "2 E"]]  # per layer: tokens per expert, of text and of images


def train_step(
    model: CausalEncoderDecoder,
    optimizer: Optimizers,
    packed: PackedBatch,
    config: TrainConfig,
    step: int,
) -> StepResult:
    """Train on one batch; raises DivergedError before anything has changed."""
    device = model.norm.weight.device
    ids = packed.ids.to(device)
    embeds = None
    if packed.pixels is not None:
        assert model.vision is not None, "images for a model without a vision encoder"
        embeds = model.vision(scale_pixels(packed.pixels.to(device)), packed.grids)
    batch, recompute = Batch.packed(ids, packed.lengths, embeds), config.activation_checkpointing
    out = model(batch, objectives=config.objectives, recompute=recompute)
    learned = packed.learned(model.config.image_token_id if config.learn_image_tokens else None)
    rows, targets = next_tokens(ids, packed.lengths, learned)
    loss = backward(model, out.hidden, rows, targets, weighted(out.losses, config))
    grad_norm = clip_gradients(optimizer, config.optimizer.clip_norm)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        optimizer.zero_grad()
        raise DivergedError(
            f"step {step + 1}: the loss is {loss}, the gradient norm {grad_norm}; the parameters "
            "are those of the step before. Start again with a lower optimizer.lr or a longer "
            "warmup_tokens"
        )
    lr = config.optimizer.lr * lr_factor(config, step)
    optimizer.set_lr(lr)
    optimizer.step()
    optimizer.zero_grad()
    update_biases(
        model, out.expert_counts, config.balance_speed, by_modality=config.modality_biases
    )
    return StepResult(
        loss=loss,
        indexer_loss=_number(out.losses.indexer),
        balance_loss=_number(out.losses.balance),
        grad_norm=grad_norm,
        lr=lr,
        loads=out.expert_counts,
    )


def next_tokens(
    ids: Int[Tensor, " T"], lengths: tuple[int, ...], learned: Bool[Tensor, " T"] | None = None
) -> tuple[Int[Tensor, " targets"], Int[Tensor, " targets"]]:
    """Rows that predict a token, and these tokens: a document's last token predicts none.

    ``learned`` says which tokens count as targets; None means all.
    """
    last = torch.tensor(lengths, device=ids.device).cumsum(0) - 1
    predicts = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    if learned is not None:
        predicts[:-1] = learned[1:].to(ids.device)
    predicts[last] = False
    rows = predicts.nonzero()[:, 0]
    return rows, ids[rows + 1]


def backward(
    model: CausalEncoderDecoder,
    hidden: Float[Tensor, "T D"],
    rows: Int[Tensor, " targets"],
    targets: Int[Tensor, " targets"],
    others: Sequence[Float[Tensor, ""]] = (),
) -> float:
    """Mean cross-entropy of the targets; its gradients and those of ``others`` in every parameter.

    The head runs forward and backward piece by piece, so that only one piece of logits is alive.
    """
    cut = hidden.detach().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for own, wanted in _pieces(rows, targets, model.config.vocab_size):
        piece = F.cross_entropy(model.logits(cut[own]), wanted, reduction="sum") / len(targets)
        piece.backward()
        loss += piece.detach()
    torch.autograd.backward([hidden, *others], [cut.grad, *[None] * len(others)])
    return float(loss)


def weighted(losses: Losses, config: TrainConfig) -> list[Float[Tensor, ""]]:
    """The losses of single layers by their weights, where something is there to learn."""
    pairs = (config.indexer_loss, losses.indexer), (config.balance_loss, losses.balance)
    return [weight * loss for weight, loss in pairs if loss is not None and loss.requires_grad]


@torch.no_grad()
def summed_loss(
    model: CausalEncoderDecoder,
    hidden: Float[Tensor, "T D"],
    rows: Int[Tensor, " targets"],
    targets: Int[Tensor, " targets"],
) -> float:
    """Summed cross-entropy of the targets, without gradients."""
    loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for own, wanted in _pieces(rows, targets, model.config.vocab_size):
        loss += F.cross_entropy(model.logits(hidden[own]), wanted, reduction="sum")
    return float(loss)


def clip_gradients(optimizer: Optimizers, max_norm: float) -> float:
    """Norm of all gradients together; they are scaled down to ``max_norm`` unless it is 0."""
    return float(torch.nn.utils.clip_grad_norm_(optimizer.parameters(), max_norm or math.inf))


def _number(loss: Tensor | None) -> float | None:
    return None if loss is None else loss.item()


def _pieces(rows: Tensor, targets: Tensor, vocab_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    size = max(1, LOGITS_AT_ONCE // vocab_size)
    return zip(rows.split(size), targets.split(size), strict=True)
