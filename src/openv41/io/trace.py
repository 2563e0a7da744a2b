"""Traces: what a checkpoint computes, under the tensor names of the golden data. Report §2.1.

Everything comes from one probe on the ordinary forward: no second implementation of any layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from openv41.config import NUMERICS, NumericsConfig
from openv41.errors import InputError
from openv41.io.tensor_files import read_tensors
from openv41.io.trace_draft import DraftTrace
from openv41.io.trace_image import trace_image
from openv41.io.trace_inputs import Inputs
from openv41.io.trace_values import (
    as_input,
    as_stored,
    feed_tokens,
    leaf,
    margin_of,
    one_request,
    selection_margins,
    widen,
)
from openv41.layers.batch import Batch
from openv41.layers.probe import Probe
from openv41.model.cache import DenseStore
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.prefill import (
    PrefillMode,
    ReplayVariant,
    find_cut,
    layer_rows,
    prompt_rows,
)
from openv41.plan import plan_layers

Mode = Literal["f32", "f32qat", "released", "f64"]
GREEDY_TOKENS = 24
REPLAY_STEPS = 12

# The golden files of "released" score in bfloat16, as the released code does.
TRACE_NUMERICS: dict[str, NumericsConfig] = {
    "f32": NUMERICS["f32"],
    "f32qat": NUMERICS["f32qat"],
    "released": replace(NUMERICS["released"], score_dtype="bfloat16"),
    "f64": NUMERICS["f32"],
}
TRACE_DTYPES: dict[str, torch.dtype | Literal["stored"]] = {
    "f32": torch.float32,
    "f32qat": torch.float32,
    "released": "stored",
    "f64": torch.float64,
}
CASES = ("prefill", "decode", "batch", "replay", "image")

_STREAMS = {"out", "pre_mix_out", "after_engram"}
_SUBSET = _STREAMS | {"final_hidden", "attn_out", "ffn_out", "window_kv"}
_LEFT_OUT = {
    "f32": {"embed"},
    "f64": {"embed"},
    "f32qat": {
        *("embed", "attn_out", "ffn_out", "window_kv", "after_engram", "engram_gate"),
        *("main_hidden", "index_score_row_last"),
    },
    "released": {"window_kv"},
}
_COPIED = (
    *("after_engram", "engram_gate", "window_kv", "main_kv", "index_k", "candidate_mask"),
    *("topk_indices", "attn_out", "expert_ids", "expert_weights", "ffn_out", "out", "pre_mix_out"),
)
_FED = (*_STREAMS, "main_kv", "index_k", "topk_indices", "candidate_mask")


@torch.no_grad()
def run_case(
    model: CausalEncoderDecoder,
    inputs: Inputs,
    case: str,
    mode: Mode,
    feed: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Run a case on a model that was loaded for ``mode``; return its tensors by name.

    With ``feed`` each layer of a prefill starts from the given streams, and reads the given main
    KV, index keys and selections; what it computes itself is returned.
    """
    if case not in CASES:
        raise InputError(f"case is {case!r}, must be one of {', '.join(CASES)}")
    if feed is not None and case != "prefill":
        raise InputError(f"feed works with case prefill, not {case}")
    if feed is not None:
        inputs = replace(inputs, subset_positions=feed["subset_positions"].long())
        return trace_prefill(model, inputs, mode, feed)
    if case == "prefill":
        return trace_prefill(model, inputs, mode)
    if case == "image":
        return trace_image(model, inputs, mode)
    others = {"decode": trace_decode, "batch": trace_batch, "replay": trace_replay}
    return others[case](model, inputs)


def trace_prefill(
    model: CausalEncoderDecoder,
    inputs: Inputs,
    mode: Mode,
    feed: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """One forward over all text tokens."""
    fed = {} if feed is None else {n: as_input(t) for n, t in feed.items() if leaf(n) in _FED}
    probe = Probe(feed=fed)
    output = model(one_request(inputs.text_ids), probe=probe)
    seen = {**probe.values, "logits": model.logits(output.hidden)}
    kinds = ("embed", "main_hidden", "final_hidden", "logits")
    traced: dict[str, Tensor] = {name: seen[name] for name in kinds if name in seen}
    if hashes := [t for name, t in seen.items() if leaf(name) == "engram_hash_ids"]:
        traced["engram_hash_ids"] = torch.stack(hashes, dim=1)
    for plan in plan_layers(model.config):
        name = f"layers.{plan.layer}"
        traced |= {f"{name}.{k}": seen[n] for k in _COPIED if (n := f"{name}.{k}") in seen}
        traced[f"{name}.router_margin"] = margin_of(
            seen[f"{name}.router_scores"], model.config.moe.top_k
        )
        if plan.is_index_source:
            traced |= selection_margins(model, plan, seen, fed)
    kept = {n: t for n, t in traced.items() if leaf(n) not in _LEFT_OUT[mode]}
    subset = _SUBSET - _STREAMS if mode == "released" else _SUBSET
    rows = inputs.subset_positions
    shown = {n: as_stored(t[rows] if leaf(n) in subset else t) for n, t in kept.items()}
    return shown if mode != "released" else {**shown, "subset_positions": as_stored(rows)}


def trace_decode(
    model: CausalEncoderDecoder, inputs: Inputs, *, greedy: int = GREEDY_TOKENS
) -> dict[str, Tensor]:
    """Prefill, then the remaining text token by token; then greedy tokens after the prefill."""
    config, first = model.config, inputs.prefill_len
    store = DenseStore(config.compress_ratios)
    model_step = partial(feed_tokens, model, store)
    drafts = DraftTrace(model, store)
    prompt_logits, seen = model_step(inputs.text_ids[:first], 0)
    drafts.commit(inputs.text_ids[:first], 0, seen)
    steps = []
    for position, ids in enumerate(inputs.text_ids[first:].split(1), start=first):
        logits, seen = model_step(ids, position)
        drafts.commit(ids, position, seen)
        drafts.draft(logits, position + 1)
        steps.append((logits, seen))
    traced = {
        "positions": torch.arange(first, len(inputs.text_ids)),
        "logits": torch.stack([logits for logits, _ in steps]),
        "expert_ids": torch.stack(
            [
                torch.cat([seen[f"layers.{i}.expert_ids"] for i in range(config.num_layers)])
                for _, seen in steps
            ]
        ),
    }
    for layer in config.index_sources:
        name = f"layers.{layer}.topk_indices"
        traced[name] = torch.cat([widen(seen[name], config.indexer.top_k) for _, seen in steps])
    traced |= drafts.tensors()
    store.truncate(0, first)
    traced |= _greedy(prompt_logits, first, greedy, model_step)
    return {name: as_stored(value) for name, value in traced.items()}


def trace_batch(model: CausalEncoderDecoder, inputs: Inputs) -> dict[str, Tensor]:
    """Rows of one batch: logits of the last position and of the last of the first half."""
    count, length = inputs.batch_ids.shape
    batch = Batch.packed(inputs.batch_ids.flatten(), [length] * count)
    logits = model.logits(model(batch).hidden).unflatten(0, (count, length))
    return {"logits_last": logits[:, -1], "logits_mid": logits[:, length // 2 - 1]}


def trace_replay(model: CausalEncoderDecoder, inputs: Inputs) -> dict[str, Tensor]:
    """Decoder SWA Bounded Replay of the prompt in both variants, then the next text tokens."""
    config, length = model.config, inputs.prefill_len
    cut, reason = find_cut(config)
    if cut is None:
        raise InputError(f"the prefill of this model cannot be cut: {reason}")
    traced = {}
    for variant in ReplayVariant:
        store = DenseStore(config.compress_ratios)
        rows = prompt_rows(config, PrefillMode.BOUNDED, length, cut=cut, variant=variant)
        prompt = Batch(inputs.text_ids[:length], (0,), (0,), (length,))
        output = model(prompt, store, rows=layer_rows(config, {0: rows}))
        traced[f"{variant}.prefill_rows_logits"] = model.logits(output.hidden)
        following = inputs.text_ids[length : length + REPLAY_STEPS].split(1)
        steps = [feed_tokens(model, store, ids, length + i)[0] for i, ids in enumerate(following)]
        traced[f"{variant}.decode_logits"] = torch.stack(steps)
    return traced


def read_feed(path: Path, model: CausalEncoderDecoder, inputs: Inputs) -> dict[str, Tensor]:
    """Read a prefill file whose tensors shall be the layers' inputs, and check that it has them."""
    feed, problems = read_tensors(path), []
    for name, need in _needed_feed(model, len(inputs.text_ids)).items():
        problem = need.problem_of(feed[name]) if name in feed else f"no tensor {name}"
        if problem:
            problems.append(f"{name} {problem}" if name in feed else problem)
    if problems:
        raise InputError(
            f"{path} cannot be fed: {'; '.join(problems[:4])}"
            f"{f' and {len(problems) - 4} more' if len(problems) > 4 else ''}; "
            "give the prefill_released file of this model and case, which holds every row"
        )
    return feed


@dataclass(frozen=True, slots=True)
class _Need:
    """Shape of a tensor that is fed (None is any size), and the range of its whole numbers."""

    shape: tuple[int | None, ...]
    allowed: range | None = None  # None: floats

    def problem_of(self, found: Tensor) -> str:
        """Say what is wrong with a tensor, or nothing."""
        sizes = [*found.shape]
        if len(sizes) != len(self.shape) or any(
            want not in (None, size) for size, want in zip(sizes, self.shape, strict=True)
        ):
            wanted = ", ".join("any" if want is None else str(want) for want in self.shape)
            return f"is {sizes}, must be [{wanted}]"
        if found.is_floating_point() != (self.allowed is None):
            kind = "floats" if self.allowed is None else "whole numbers"
            return f"is {str(found.dtype).removeprefix('torch.')}, must be {kind}"
        if self.allowed is None or not found.numel():
            return ""
        least, most = int(found.min()), int(found.max())
        outside = [value for value in (least, most) if value not in self.allowed]
        bounds = f"{self.allowed[0]}..{self.allowed[-1]}"
        return f"holds {outside[0]}, must be in {bounds}" if outside else ""


def _needed_feed(model: CausalEncoderDecoder, tokens: int) -> dict[str, _Need]:
    config, streams = model.config, model.config.mhc.num_streams
    needed = {"subset_positions": _Need((None,), range(tokens))}
    for plan in plan_layers(config):
        name = f"layers.{plan.layer}"
        entries = tokens // plan.ratio if plan.ratio else 0
        needed[f"{name}.out"] = _Need((tokens, streams, config.hidden_size))
        needed[f"{name}.pre_mix_out"] = _Need((tokens, streams))
        if plan.has_engram:
            needed[f"{name}.after_engram"] = needed[f"{name}.out"]
        if plan.is_kv_source:
            needed[f"{name}.main_kv"] = _Need((entries, config.attention.head_dim))
            needed[f"{name}.index_k"] = _Need((entries, config.indexer.head_dim))
        if plan.is_index_source:
            needed[f"{name}.topk_indices"] = _Need((tokens, None), range(-1, entries))
        if plan.publishes_candidates:
            needed[f"{name}.candidate_mask"] = _Need((tokens, entries), range(2))
    return needed


def _greedy(
    prompt_logits: Tensor,
    first: int,
    count: int,
    model_step: Callable[..., tuple[Tensor, dict[str, Tensor]]],
) -> dict[str, Tensor]:
    """The most likely token again and again, from the logits of the prompt's last position."""
    rows = [prompt_logits]
    for position in range(first, first + count - 1):
        rows.append(model_step(rows[-1].argmax()[None], position)[0])
    logits = torch.stack(rows)
    best = logits.topk(2, dim=1).values
    return {
        "greedy_logits": logits,
        "greedy_tokens": logits.argmax(dim=1),
        "greedy_margin": best[:, 0] - best[:, 1],
    }
