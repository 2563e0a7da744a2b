"""What a fixture must exercise, measured on the fixture itself. Report §2.1.

A mini model passes by luck where a mechanism never acts; each rule counts how often one does.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from openv41.config import ModelConfig
from openv41.io.trace_values import selection_margins
from openv41.layers.batch import Batch
from openv41.layers.probe import Probe
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.ngram_hash_constants import hash_constants
from openv41.ops import quantize
from openv41.plan import Mode, plan_layers


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A figure and the least it must be."""

    name: str
    value: float
    at_least: float

    @property
    def is_met(self) -> bool:
        """Whether the fixture exercises this."""
        return self.value >= self.at_least


@torch.no_grad()
def check_rules(model: CausalEncoderDecoder, tensors: Mapping[str, Tensor]) -> list[Rule]:
    """Measure every rule with one forward over the text."""
    ids = tensors["text_ids"].long()
    probe, clamped = Probe(), _count_clamped(model)
    model(Batch.packed(ids, [len(ids)]), probe=probe)
    handles, counts = clamped
    for handle in handles:
        handle.remove()
    found = [*_sizes(model.config, tensors), *_schedule(model.config), *_parameters(model)]
    found += [("SwiGLU lanes above the limit", sum(counts), 1)]
    found += _choices(model, probe.values)
    found += _rounding(model.config, probe.values)
    return [Rule(name=n, value=float(v), at_least=float(least)) for n, v, least in found]


def check_draft_rules(
    model: CausalEncoderDecoder,
    tensors: Mapping[str, Tensor],
    outputs: Mapping[str, Mapping[str, Tensor]],
) -> list[Rule]:
    """Measure what the outputs exercise of a drafter; nothing where the model has none."""
    if model.drafter is None:
        return []
    found = _drafts(model, tensors, outputs["decode"])
    return [Rule(name=n, value=float(v), at_least=float(least)) for n, v, least in found]


IMAGES_README = """
`image_ids`: a text with two images, whose spans start at `image_starts`; `image_token_types` says
what each token is (-1 text, 0 start, 1 image, 2 newline, 3 end); `image{k}.patches` and the grids
of patches (`image_grids_vit`) and of merged cells (`image_grids_llm`), rows and columns. Their
outputs are in `image_f64`."""

DRAFTS_README = """
The drafter, tensors `mtp.*` of the checkpoint, drafts greedily behind the likeliest next token: in
`decode_f64` after each step, in `prompts_f64` behind each prefix, the shorter of which do not fill
its window. `dspark_tokens` begin with that token; `dspark_base_logits` are without the Markov bias,
`dspark_logits` with it; `dspark_confidence` are logits too."""

Figures = Iterator[tuple[str, float, float]]


def _sizes(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Figures:
    length, window = len(tensors["text_ids"]), config.attention.window_size
    prefill_len = int(tensors["prefill_len"])
    prompts = set(tensors["prompt_lengths"].tolist())
    indexer = config.indexer
    yield "windows in the text", length / window, 3
    yield "windows in the prefill", prefill_len / window, 3
    edges = {1, 2, 3, max(1, window - 1), window, window + 1}
    yield "prompt lengths 1, 2, 3 and around the window", len(edges & prompts), len(edges)
    yield "odd and even long prompts", len({n % 2 for n in prompts if n > 3 * window}), 2
    yield "tokens in a half-full group after the prefill", prefill_len % 2, 1
    for ratio in sorted({r for r in config.compress_ratios if r}):
        entries = length // ratio
        yield f"entries per selected one, ratio {ratio}", entries / indexer.top_k, 2
    yield "entries per candidate", length / indexer.pool_size, 2
    yield "entries in the partial newest block", length % indexer.block_size, 1
    visible = [(t + 1) // max(config.compress_ratios) for t in range(length)]
    yield "rows with fewer entries than the top-k", sum(0 < v < indexer.top_k for v in visible), 2
    yield "rows without an entry", visible.count(0), 1
    yield (
        "positions beyond the original context",
        (length - config.attention.yarn.original_max_position),
        1,
    )
    yield (
        "rotary bases",
        len({config.attention.rope_theta, config.attention.compress_rope_theta}),
        2,
    )
    yield "YaRN factor", config.attention.yarn.factor, 2
    yield "requests in the batch", len(tensors["batch_ids"]), 2
    yield "lengths of packed documents", len(set(tensors["packed_lengths"].tolist())), 2
    if config.vision:
        starts = tensors["image_starts"].tolist()
        yield "images in the text with images", len(starts), 2
        yield "image spans that start inside a group", sum(start % 2 for start in starts), 1


def _schedule(config: ModelConfig) -> Figures:
    plans = plan_layers(config)
    yield "window-only layers", sum(p.mode is Mode.WINDOW for p in plans), 2
    for ratio in (1, 2):
        modes = {p.mode for p in plans if p.ratio == ratio}
        yield f"layer modes with ratio {ratio}", len(modes), 3
    yield "Reindex layers with a candidate pool", sum(p.uses_candidates for p in plans), 1
    if config.engram:
        yield "n-gram orders", config.engram.num_orders, 3
        yield "hash heads", config.engram.num_heads, 2
        primes = [p for c in hash_constants(config.engram) for row in c.primes for p in row]
        yield "different primes", len(set(primes)), len(primes)


def _parameters(model: CausalEncoderDecoder) -> Figures:
    named = dict(model.named_parameters())
    norms = [p for name, p in named.items() if name.endswith("norm.weight")]
    yield "smallest norm weight", min(float(p.min()) for p in norms), 0.5
    yield "largest norm weight below 1.5", 1.5 - max(float(p.max()) for p in norms), 0
    yield "least spread of a norm's weights", min(float(p.std()) for p in norms), 0.1
    leaves = ("bias", "bias_vl", "base", "sink")
    biases = [p for name, p in named.items() if name.rpartition(".")[2] in leaves]
    yield (
        "smallest root mean square of a bias, base or sink",
        min(float(p.square().mean().sqrt()) for p in biases),
        0.1,
    )
    num = model.config.mhc.num_streams
    combs = [
        p[2 * num :].unflatten(0, (num, num)) for name, p in named.items() if name.endswith("base")
    ]
    yield "least asymmetry of a stream mix", min(float((c - c.T).abs().max()) for c in combs), 0.1


def _choices(model: CausalEncoderDecoder, seen: Mapping[str, Tensor]) -> Figures:
    selections = pools = 0
    for plan in plan_layers(model.config):
        if not plan.is_index_source:
            continue
        margins = selection_margins(model, plan, seen, {})
        selections += int((margins[f"layers.{plan.layer}.topk_margin"] == 0).sum())
        if plan.publishes_candidates:
            pools += int((margins[f"layers.{plan.layer}.candidate_margin"] == 0).sum())
    yield "exact ties at the edge of a selection", selections, 3
    yield "exact ties at the edge of a candidate pool", pools, 1


def _rounding(config: ModelConfig, seen: Mapping[str, Tensor]) -> Figures:
    window = torch.cat([seen[f"layers.{i}.window_kv"] for i in range(config.num_layers)]).float()
    main = torch.cat([seen[f"layers.{i}.main_kv"] for i in config.kv_sources]).float()
    index = torch.cat([seen[f"layers.{i}.index_k"] for i in config.kv_sources]).float()
    codes, _ = quantize.quantize_fp8(window)
    largest = int((codes.float().abs() == quantize.E4M3_MAX).sum())
    yield "window KV lanes at the largest FP8 code", largest, 1
    _, scales = quantize.quantize_fp4_e4m3(main)
    spread = scales.float().repeat_interleave(quantize.MAIN_KV_BLOCK, dim=-1)[..., : main.shape[-1]]
    clamped = int((main.abs() > quantize.E2M1_MAX * spread).sum())
    yield "main KV lanes clamped at the largest FP4 code", clamped, 1
    packed, _ = quantize.quantize_mxfp4(index)
    largest = int((quantize.unpack_e2m1(packed).abs() == quantize.E2M1_MAX).sum())
    yield "index key lanes at the largest FP4 code", largest, 1


def _drafts(
    model: CausalEncoderDecoder, tensors: Mapping[str, Tensor], decoded: Mapping[str, Tensor]
) -> Figures:
    dspark, window = model.config.dspark, model.config.attention.window_size
    assert dspark is not None, "a drafter without sizes"
    lengths = tensors["prompt_lengths"]
    yield "stages of the drafter", dspark.num_stages, 2
    yield "tokens of a block", dspark.block_size, 2
    yield "layers that the drafter reads", len(dspark.target_layer_ids), 2
    yield "experts of the drafter per chosen one", dspark.num_experts / dspark.top_k, 2
    yield "draft windows that are full", int((lengths >= window).sum()), 2
    yield "draft windows that are not", int((lengths < window).sum()), 2
    tokens, confidence = decoded["dspark_tokens"], decoded["dspark_confidence"]
    chosen, alone = tokens[:, 1:], decoded["dspark_base_logits"].argmax(dim=-1)
    yield "blocks that differ", len(chosen.unique(dim=0)), 4
    yield "drafts that the Markov bias changes", int((chosen != alone).sum()), 4
    below = int((confidence < 0).sum())
    yield "confidences on either side of a half", min(below, confidence.numel() - below), 4


def _count_clamped(
    model: CausalEncoderDecoder,
) -> tuple[list[torch.utils.hooks.RemovableHandle], list[int]]:
    """Count pre-activations of the shared experts above the limit during the next forward."""
    counts: list[int] = []
    limit = model.config.moe.swiglu_limit

    def count(module: torch.nn.Module, inputs: object, output: Tensor) -> None:
        del module, inputs
        counts.append(int((output.abs() > limit).sum()))

    ups = [m for name, m in model.named_modules() if name.endswith(("shared.w1", "shared.w3"))]
    return [module.register_forward_hook(count) for module in ups], counts


def readme(seed: int, config: ModelConfig, rules: list[Rule]) -> str:
    """Text of the fixture's README."""
    lines = [f"- {'' if r.is_met else 'NOT MET: '}{r.name}: {r.value:g}" for r in rules]
    images = IMAGES_README if config.vision else ""
    drafts = DRAFTS_README if config.dspark else ""
    measured = "\n".join(lines) or "- not measured: the fixture was made without outputs"
    return f"""# A random checkpoint with its inputs and outputs (seed {seed})

`checkpoint/` is a model in the released format: {config.num_layers} layers, hidden size
{config.hidden_size}, vocabulary {config.vocab_size}. Its weights are random.

`inputs.safetensors`: `text_ids`, of which the first `prefill_len` are the prompt;
`subset_positions`, the rows kept of wide tensors; `batch_ids`; `prompt_lengths`, prefixes of the
text; `packed_ids` with `packed_lengths`, documents that must not see each other.{images}

`prefill_f64`, `decode_f64`, `batch_f64`: outputs under the names of the golden data; `prompts_f64`:
logits of the last token of each prefix; `packed_f64`: logits of every packed token.{drafts}

The outputs were computed by openv41's own model in float64 (rotary tables in float32, as the model
defines them), without any rounding of caches or inputs. They are **not** an independent
implementation's: they say that a port agrees with openv41, not that both are right.

Ties are broken by the lowest index. Compare with:

    openv41 compare prefill_f64.safetensors YOURS.safetensors --bounds f32

## What the sizes exercise
{measured}
"""
