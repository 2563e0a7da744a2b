"""The model: a causal encoder-decoder over packed tokens of text and images. Report §2.1, §2.2.

The lower half encodes; the decoder's first Full layer turns its output into the one main KV that
all decoder layers share (Eq. (1) in its general form: any set of kv sources). Training, prefill,
decode and verification are the same forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from openv41 import ops
from openv41.config import NUMERICS, ModelConfig, NumericsConfig
from openv41.errors import InputError
from openv41.layers.batch import Batch
from openv41.layers.context import Choices, ForwardContext, Work
from openv41.layers.csa2 import CSA2Attention
from openv41.layers.decode_context import DecodeContext, DecodeState
from openv41.layers.embedding import Embedding
from openv41.layers.engram import Engram
from openv41.layers.experts import MixtureOfExperts
from openv41.layers.factory import Factory
from openv41.layers.geometry import ReplayBounds
from openv41.layers.objectives import LayerLosses, Losses, Objectives
from openv41.layers.probe import Probe
from openv41.layers.quantized_linear import RMSNorm
from openv41.layers.single_pass_mhc import SinglePassMHC, Streams
from openv41.layers.store import KVStore, Slot
from openv41.model.dspark import DSparkDrafter
from openv41.model.image_tower import ImageTower
from openv41.model.prefill import LayerRows
from openv41.plan import LayerPlan, plan_layers


@dataclass(frozen=True, eq=False)
class Output:
    """What a forward returns."""

    hidden: Float[Tensor, "T D"]  # after the final norm
    batch: Batch  # the tokens that have a row in ``hidden``
    taps: Float[Tensor, "rows width"] | None  # concatenated stream means for the drafter
    tap_batch: Batch | None  # the tokens that have a row in ``taps``
    expert_counts: dict[int, Int[Tensor, "2 E"]]  # per layer: tokens of text, of images
    losses: Losses  # those that the caller asked for
    work: Work
    logits: Float[Tensor, "T V"] | None = None  # of each row, where they were computed at once


class Layer(nn.Module):
    """One layer: Engram if planned, then attention and experts, each around an mHC site."""

    def __init__(
        self,
        config: ModelConfig,
        plan: LayerPlan,
        numerics: NumericsConfig,
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        dim, eps, mhc = config.hidden_size, config.norm_eps, config.mhc
        self.plan = plan
        if plan.has_engram:
            assert config.engram is not None, f"layer {plan.layer} planned without an Engram"
            self.engram = Engram(plan.layer, config, config.engram, numerics, **made)
        self.attn_mhc = SinglePassMHC(dim, mhc, eps, numerics, **made)
        self.attn_norm = RMSNorm(dim, eps, **made)
        self.attention = CSA2Attention(config, plan, numerics, **made)
        self.ffn_mhc = SinglePassMHC(dim, mhc, eps, numerics, **made)
        self.ffn_norm = RMSNorm(dim, eps, **made)
        self.moe = MixtureOfExperts(plan.layer, dim, config.moe, numerics, **made)

    def forward(self, streams: Streams, ctx: ForwardContext) -> Streams:
        """Advance the streams; the last block's output may stay pending."""
        name = f"layers.{self.plan.layer}"
        if self.plan.has_engram:
            x = self.engram(streams.settled(ctx.deterministic).x, ctx)
            streams = Streams(ctx.observe(f"{name}.after_engram", x), streams.a)
        if self.plan.is_tap:
            streams = streams.settled(ctx.deterministic)
            ctx.taps.append((streams.mean(), ctx.batch))
        streams = self.attn_mhc(streams, self.attn_norm.weight, lambda h: self._attend(h, ctx))
        streams = self.ffn_mhc(streams, self.ffn_norm.weight, lambda h: self._feed_forward(h, ctx))
        if ctx.is_wanted(f"{name}.out"):
            x = ctx.observe(f"{name}.out", streams.settled(ctx.deterministic).x)
            streams = Streams(x, streams.a)
        return streams._replace(a=ctx.observe(f"{name}.pre_mix_out", streams.a))

    def write_kv(self, streams: Streams, ctx: ForwardContext, *, window: bool) -> None:
        """Leave the KV of tokens that end here, with or without window KV."""
        x, a, _ = streams.settled(ctx.deterministic)
        if self.plan.has_engram:
            x = self.engram(x, ctx)
        self.attention.write_kv(self.attn_norm(ops.mix_streams(x, a)), ctx, window=window)

    def _attend(self, h: Float[Tensor, "T D"], ctx: ForwardContext) -> Float[Tensor, "T D"]:
        y = self.attention(h, ctx)
        return ctx.observe(f"layers.{self.plan.layer}.attn_out", y)

    def _feed_forward(self, h: Float[Tensor, "T D"], ctx: ForwardContext) -> Float[Tensor, "T D"]:
        y = self.moe(h, ctx)
        return ctx.observe(f"layers.{self.plan.layer}.ffn_out", y)


class Head(Embedding):
    """The prediction head, in at least float32."""

    def forward(self, hidden: Float[Tensor, "T D"], *, deterministic: bool) -> Float[Tensor, "T V"]:
        """Score the vocabulary."""
        return ops.wide_linear(hidden, self.weight, deterministic=deterministic)

    def loss(
        self,
        hidden: Float[Tensor, "targets D"],
        targets: Int[Tensor, " targets"],
        weights: Float[Tensor, " targets"] | None = None,
    ) -> ops.LinearLoss:
        """Cross-entropy of one target per row; never holds all logits."""
        return ops.linear_cross_entropy(hidden, self.weight, targets, weights)

    def reverse_kl(
        self,
        hidden: Float[Tensor, "targets D"],
        teacher: "Head",
        teacher_hidden: Float[Tensor, "targets width"],
    ) -> ops.LinearLoss:
        """KL to what a teacher's head says of its own rows; never holds all logits."""
        return ops.linear_reverse_kl(hidden, self.weight, teacher_hidden, teacher.weight)


class CausalEncoderDecoder(nn.Module):
    """The whole model; ``vision`` and ``drafter`` are None where it has no such part.

    The drafter takes no part in the forward: see model/dspark.py.
    Parameters are uninitialised: see model/init.py and io/checkpoint.py.
    """

    token_map: Tensor | None

    def __init__(
        self,
        config: ModelConfig,
        numerics: NumericsConfig = NUMERICS["f32"],
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.config = config
        self.numerics = numerics
        self.vision: ImageTower | None = None
        if config.vision is not None:
            self.vision = ImageTower(config.vision, config.hidden_size, numerics, **made)
        self.embed = Embedding(config.vocab_size, config.hidden_size, **made)
        self.layers = nn.ModuleList(
            Layer(config, plan, numerics, **made) for plan in plan_layers(config)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, **made)
        self.head = Head(config.vocab_size, config.hidden_size, **made)
        self.drafter: DSparkDrafter | None = None
        if config.dspark is not None:
            self.drafter = DSparkDrafter(config, config.dspark, numerics, **made)
        self.register_buffer("token_map", None, persistent=False)
        self.pad_id = 0  # compressed

    def set_token_map(self, token_map: Sequence[int] | Int[Tensor, " V"]) -> None:
        """Set the compressed id of every token, which the Engram layers hash."""
        ids = torch.as_tensor(token_map, dtype=torch.int64)
        engram = self.config.engram
        if engram is None:
            raise InputError("token map: the model has no Engram layer; leave it out")
        if ids.shape != (self.config.vocab_size,) or int(ids.max()) >= engram.compressed_vocab_size:
            raise InputError(
                f"token map: {tuple(ids.shape)} ids up to {int(ids.max())}; the model needs "
                f"{self.config.vocab_size} ids below {engram.compressed_vocab_size}"
            )
        self.token_map = ids.to(self.norm.weight.device)
        self.pad_id = int(ids[engram.pad_token_id])

    def forward(
        self,
        batch: Batch,
        store: KVStore | None = None,
        *,
        rows: Sequence[LayerRows] | None = None,
        probe: Probe | None = None,
        objectives: Objectives | None = None,
        replay: ReplayBounds | None = None,
        recompute: bool = False,
    ) -> Output:
        """Run every layer on every token of the batch, or each layer on its ``rows``.

        With ``replay`` whole texts see what they would see after a bounded prefill. With
        ``recompute`` only the streams between layers are kept for the backward pass, which runs
        each layer once more (activation checkpointing).

        Raises InputError for token ids outside the vocabulary, image tokens without embeddings,
        positions beyond a request's stored length, ``objectives`` or ``replay`` of part of a text.
        """
        if (objectives or replay) is not None and not (store is None and rows is None):
            raise InputError("objectives and replay need whole texts; leave out store and rows")
        losses = None if objectives is None else LayerLosses(objectives)
        ctx = self.context(batch, store, probe, losses, replay)
        return self._run(ctx, rows, recompute=recompute)

    def decode(self, state: DecodeState) -> Output:
        """The same for one token of text of each request, where ``state`` says.

        Nothing is checked and nothing waits for the device, so that a CUDA graph can hold it.
        """
        deterministic = self.numerics.deterministic
        ctx = DecodeContext(state, self.config.attention, deterministic=deterministic)
        self._look_back(ctx, state.token_ids)
        return self._run(ctx)

    def _run(
        self,
        ctx: ForwardContext,
        rows: Sequence[LayerRows] | None = None,
        *,
        recompute: bool = False,
    ) -> Output:
        """Every layer, one after the other."""
        for engram in self.engrams():
            engram.prefetch(ctx)
        losses, streams = ctx.losses, self.first_streams(ctx.batch, ctx)
        for number, layer in enumerate(self.layers):
            if rows is not None:
                streams, ctx = enter(layer, streams, ctx, rows[number])
            if len(streams.x) or rows is None:
                streams = run_twice(layer, streams, ctx) if recompute else layer(streams, ctx)
        x, a, _ = streams.settled(ctx.deterministic)
        hidden = ctx.observe("final_hidden", self.norm(ops.mix_streams(x, a)))
        tapped = self.config.dspark.target_layer_ids if self.config.dspark else ()
        taps, tap_batch = join_taps(ctx.taps, len(tapped))
        if taps is not None:
            ctx.observe("main_hidden", taps)
        total = Losses() if losses is None else losses.total()
        return Output(hidden, ctx.batch, taps, tap_batch, ctx.expert_counts, total, ctx.work)

    @property
    def stream_dtype(self) -> torch.dtype:
        """Of the residual streams, and of the features that a drafter reads."""
        is_narrow = self.numerics.compute_dtype == "bfloat16"
        return torch.bfloat16 if is_narrow else self.embed.weight.dtype

    def engrams(self) -> list[Engram]:
        """The Engram of each layer that has one."""
        return [
            layer.engram
            for layer in self.layers
            if isinstance(layer, Layer) and layer.plan.has_engram
        ]

    def logits(self, hidden: Float[Tensor, "T D"]) -> Float[Tensor, "T V"]:
        """Score the vocabulary, in at least float32."""
        scores: Tensor = self.head(hidden, deterministic=self.numerics.deterministic)
        return scores

    def context(
        self,
        batch: Batch,
        store: KVStore | None = None,
        probe: Probe | None = None,
        losses: LayerLosses | None = None,
        replay: ReplayBounds | None = None,
    ) -> ForwardContext:
        """Check a batch and prepare what its layers share."""
        ids, config = batch.token_ids, self.config
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size):
            raise InputError(
                f"token ids run from {int(ids.min())} to {int(ids.max())}; the vocabulary has "
                f"{config.vocab_size}"
            )
        self._check_starts(batch, store)
        is_image = ids == config.image_token_id
        self._check_images(batch, int(is_image.sum()))
        ctx = ForwardContext(
            batch,
            config.attention,
            store,
            probe,
            losses,
            replay=replay,
            deterministic=self.numerics.deterministic,
        )
        if batch.image_embeds is not None:
            ctx.is_image = is_image
        self._look_back(ctx, ids.masked_fill(is_image, ops.DEAD))
        return ctx

    def first_streams(self, batch: Batch, ctx: ForwardContext) -> Streams:
        """Copy the embedding into every stream; the first sub-layer reads stream 0."""
        embedded = ctx.observe("embed", self._embed(batch, ctx))
        return equal_streams(embedded, self.config.mhc.num_streams)

    def _embed(self, batch: Batch, ctx: ForwardContext) -> Float[Tensor, "T D"]:
        """Embed text by its ids; image positions take the batch's rows."""
        embedded = nn.functional.embedding(batch.token_ids, self.embed.weight)
        embedded = embedded.to(self.stream_dtype)
        if ctx.is_image is None or batch.image_embeds is None:
            return embedded
        rows = ctx.is_image.nonzero()[:, 0]
        return embedded.index_put((rows,), batch.image_embeds.to(embedded.dtype))

    def _check_images(self, batch: Batch, wanted: int) -> None:
        embeds, width = batch.image_embeds, self.config.hidden_size
        given = 0 if embeds is None else len(embeds)
        if wanted != given:
            raise InputError(
                f"batch: {wanted} image tokens (id {self.config.image_token_id}) and {given} rows "
                "of image_embeds; give one row per image token"
            )
        if embeds is not None and embeds.shape[1] != width:
            raise InputError(
                f"batch: image_embeds are {embeds.shape[1]} wide, the model's hidden size is "
                f"{width}"
            )

    def _check_starts(self, batch: Batch, store: KVStore | None) -> None:
        for request, start, stop in zip(batch.requests, batch.starts, batch.stops, strict=True):
            length = 0 if store is None else store.length(request)
            if start > length:
                raise InputError(
                    f"request {request} continues at position {start}, but only {length} are "
                    "stored; feed the missing tokens first"
                )
            if stop > self.config.max_position:
                raise InputError(
                    f"request {request} would reach position {stop}; the model allows "
                    f"{self.config.max_position}"
                )

    def _look_back(self, ctx: ForwardContext, ids: Int[Tensor, " T"]) -> None:
        """Store the token ids; give the Engram layers the newest compressed ids of each token."""
        engram = self.config.engram
        reach = engram.max_ngram if engram else 1
        raw = ctx.look_back(Slot("tokens", -1), ids, reach)  # [T, G+1], newest first
        if engram is None:
            return
        if self.token_map is None:
            raise InputError(
                "the model has Engram layers but no token map; call set_token_map with the map "
                "of the model's tokenizer"
            )
        ctx.recent_ids = torch.where(raw < 0, ops.DEAD, self.token_map[raw.clamp(min=0)])
        ctx.pad_id = self.pad_id


def equal_streams(embedded: Float[Tensor, "T D"], num_streams: int) -> Streams:
    """Every stream a copy of the embedding, and the input mix that reads stream 0 alone."""
    wide = torch.promote_types(embedded.dtype, torch.float32)
    first = torch.zeros(num_streams, device=embedded.device, dtype=wide)
    first[:1].fill_(1)
    x = embedded[:, None].expand(-1, num_streams, -1)
    return Streams(x, first.expand(len(embedded), -1))


def run_twice(layer: nn.Module, streams: Streams, ctx: ForwardContext) -> Streams:
    """Run a layer, and again in the backward pass instead of keeping what it computed.

    The second run starts from the context as it was, so that shared KV and selections are those of
    the first, and its own are not shared, nor its loads counted. It chooses what the first chose.
    """
    ctx.choices = ctx.choices or Choices()
    before, contexts = ctx.fork(), [ctx]

    def run(streams: Streams) -> Streams:
        advanced: Streams = layer(streams, contexts.pop() if contexts else before.fork())
        return advanced

    advanced: Streams = checkpoint(run, streams, use_reentrant=False, preserve_rng_state=False)
    return advanced


def enter(
    layer: nn.Module, streams: Streams, ctx: ForwardContext, rows: LayerRows
) -> tuple[Streams, ForwardContext]:
    """Go on with the rows that a layer computes; those that end before it leave their KV in it."""
    batch = ctx.batch
    firsts = rows.aligned(batch.requests)
    ending, index = batch.part(batch.starts, firsts)
    if not len(index):
        return streams, ctx
    assert isinstance(layer, Layer), f"{type(layer).__name__} is no layer"
    layer.write_kv(streams.rows(index), ctx.part(ending, index), window=not rows.windows_end)
    going_on, index = batch.part(firsts, batch.stops)
    return streams.rows(index), ctx.part(going_on, index)


def join_taps(
    taps: Sequence[tuple[Float[Tensor, "_ D"], Batch]], num_layers: int
) -> tuple[Float[Tensor, "rows width"] | None, Batch | None]:
    """Concatenate the stream means of the tokens that reached every one of the tapped layers."""
    if not taps or len(taps) < num_layers:
        return None, None
    last = taps[-1][1]
    means = [
        mean if batch is last else mean[batch.part(last.starts, last.stops)[1]]
        for mean, batch in taps
    ]
    return torch.cat(means, dim=-1), last
