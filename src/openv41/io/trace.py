"""Traces: what a checkpoint computes, under the tensor names of the golden data. Report §2.1.

Everything comes from one probe on the ordinary forward: no second implementation of any layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from openv41 import ops
from openv41.config import NUMERICS, NumericsConfig
from openv41.errors import InputError
from openv41.io.tensor_files import read_tensors
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
from openv41.plan import LayerPlan, plan_layers

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
CASES = ("prefill", "decode", "batch", "replay")
NOT_YET = {
    "image": "images come with the vision encoder",
}

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


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tokens of every case, as an inputs file holds them."""

    text_ids: Int[Tensor, " S"]
    prefill_len: int
    subset_positions: Int[Tensor, " _"]  # rows kept of wide per-layer tensors
    batch_ids: Int[Tensor, "B T"]

    @classmethod
    def read(cls, path: Path) -> "Inputs":
        """Read and check an inputs file; tensors of other cases are ignored."""
        found = read_tensors(path)
        names = ("text_ids", "prefill_len", "subset_positions", "batch_ids")
        if missing := [name for name in names if name not in found]:
            raise InputError(
                f"{path}: no tensor {', '.join(missing)}; an inputs file has {', '.join(names)}"
            )
        text, rows = found["text_ids"].long(), found["subset_positions"].long()
        prefill_len = int(found["prefill_len"].flatten()[0])
        if not 0 < prefill_len < len(text):
            raise InputError(f"{path}: prefill_len is {prefill_len}, must be in 1..{len(text) - 1}")
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(text):
            raise InputError(f"{path}: subset_positions must be rows of the {len(text)} text_ids")
        return cls(
            text_ids=text,
            prefill_len=prefill_len,
            subset_positions=rows,
            batch_ids=found["batch_ids"].long(),
        )


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
    if case in NOT_YET:
        raise InputError(f"case {case} is not there yet: {NOT_YET[case]}")
    if case not in CASES:
        raise InputError(f"case is {case!r}, must be one of {', '.join((*CASES, *NOT_YET))}")
    if feed is not None and case != "prefill":
        raise InputError(f"feed works with case prefill, not {case}")
    if feed is not None:
        inputs = replace(inputs, subset_positions=feed["subset_positions"].long())
        return trace_prefill(model, inputs, mode, feed)
    if case == "prefill":
        return trace_prefill(model, inputs, mode)
    others = {"decode": trace_decode, "batch": trace_batch, "replay": trace_replay}
    return others[case](model, inputs)


def trace_prefill(
    model: CausalEncoderDecoder,
    inputs: Inputs,
    mode: Mode,
    feed: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """One forward over all text tokens."""
    fed = {} if feed is None else {n: _as_input(t) for n, t in feed.items() if _leaf(n) in _FED}
    probe = Probe(feed=fed)
    output = model(_one_request(inputs.text_ids), probe=probe)
    seen = {**probe.values, "logits": model.logits(output.hidden)}
    kinds = ("embed", "main_hidden", "final_hidden", "logits")
    traced: dict[str, Tensor] = {name: seen[name] for name in kinds if name in seen}
    if hashes := [t for name, t in seen.items() if _leaf(name) == "engram_hash_ids"]:
        traced["engram_hash_ids"] = torch.stack(hashes, dim=1)
    for plan in plan_layers(model.config):
        name = f"layers.{plan.layer}"
        traced |= {f"{name}.{k}": seen[n] for k in _COPIED if (n := f"{name}.{k}") in seen}
        traced[f"{name}.router_margin"] = _margin(
            seen[f"{name}.router_scores"], model.config.moe.top_k
        )
        if plan.is_index_source:
            traced |= selection_margins(model, plan, seen, fed)
    kept = {n: t for n, t in traced.items() if _leaf(n) not in _LEFT_OUT[mode]}
    subset = _SUBSET - _STREAMS if mode == "released" else _SUBSET
    rows = inputs.subset_positions
    shown = {n: _as_stored(t[rows] if _leaf(n) in subset else t) for n, t in kept.items()}
    return shown if mode != "released" else {**shown, "subset_positions": _as_stored(rows)}


def trace_decode(
    model: CausalEncoderDecoder, inputs: Inputs, *, greedy: int = GREEDY_TOKENS
) -> dict[str, Tensor]:
    """Prefill, then the remaining text token by token; then greedy tokens after the prefill."""
    config, first = model.config, inputs.prefill_len
    store = DenseStore(config.compress_ratios)
    model_step = partial(_step, model, store)
    prompt_logits, _ = model_step(inputs.text_ids[:first], 0)
    steps = [
        model_step(ids, position)
        for position, ids in enumerate(inputs.text_ids[first:].split(1), start=first)
    ]
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
        traced[name] = torch.cat([_widen(seen[name], config.indexer.top_k) for _, seen in steps])
    store.truncate(0, first)
    traced |= _greedy(prompt_logits, first, greedy, model_step)
    return {name: _as_stored(value) for name, value in traced.items()}


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
        steps = [_step(model, store, ids, length + i)[0] for i, ids in enumerate(following)]
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


def selection_margins(
    model: CausalEncoderDecoder,
    plan: LayerPlan,
    seen: Mapping[str, Tensor],
    fed: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Last row of the index scores, and how close the choices of an index source were."""
    name, indexer = f"layers.{plan.layer}", model.config.indexer
    scores = seen[f"{name}.index_scores"]
    allowed = _visible(scores, plan.ratio)
    pool_name = f"layers.{plan.kv_source}.candidate_mask"
    if plan.uses_candidates:
        allowed &= fed.get(pool_name, seen[pool_name])
    found = {
        f"{name}.index_score_row_last": scores[-1],
        f"{name}.topk_margin": _margin(scores.masked_fill(~allowed, -torch.inf), indexer.top_k),
    }
    if plan.publishes_candidates:
        blocks = ops.block_scores(scores, _visible(scores, plan.ratio).sum(1), indexer.block_size)
        found[f"{name}.candidate_margin"] = _margin(blocks, indexer.candidate_blocks)
    return found


def _visible(scores: Tensor, ratio: int) -> Bool[Tensor, "T M"]:
    """Entries whose group is complete at each token of a request that starts at position 0."""
    complete = (torch.arange(len(scores)) + 1) // ratio
    return torch.arange(scores.shape[1]) < complete[:, None]


def _margin(scores: Float[Tensor, "T M"], count: int) -> Float[Tensor, " T"]:
    """Last chosen score less first rejected one; inf where nothing is rejected."""
    if scores.shape[1] <= count:
        return scores.new_full((len(scores),), torch.inf)
    best = scores.topk(count + 1, dim=1).values
    last, rejected = best[:, count - 1], best[:, count]
    return torch.where(rejected == -torch.inf, torch.inf, last - rejected)


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


def _step(
    model: CausalEncoderDecoder, store: DenseStore, ids: Tensor, start: int
) -> tuple[Float[Tensor, " V"], dict[str, Tensor]]:
    """Feed tokens of request 0; return the last logits and the discrete choices."""
    probe = Probe.recording_choices()
    output = model(Batch(ids, (0,), (start,), (len(ids),)), store, probe=probe)
    return model.logits(output.hidden[-1:])[0], probe.values


def _one_request(ids: Int[Tensor, " S"]) -> Batch:
    return Batch.packed(ids, [len(ids)])


def _widen(ids: Int[Tensor, "T K"], width: int) -> Int[Tensor, "T _"]:
    return torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=-1)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _as_input(value: Tensor) -> Tensor:
    """Ids as the model uses them."""
    if value.dtype == torch.uint8:
        return value.bool()
    return value if value.is_floating_point() else value.long()


def _as_stored(value: Tensor) -> Tensor:
    """Ids and masks as the golden files keep them."""
    if value.dtype == torch.bool:
        return value.to(torch.uint8)
    return value if value.is_floating_point() else value.to(torch.int32)
