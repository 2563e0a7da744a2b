"""The image case of a trace: two images in a text, then a few text tokens. Report §2.1.1."""

import torch
from jaxtyping import Int
from torch import Tensor

from openv41.errors import InputError
from openv41.image_grid import ImageGrid
from openv41.io.trace_inputs import Inputs
from openv41.io.trace_values import (
    as_stored,
    feed_tokens,
    leaf,
    margin_of,
    selection_margins,
)
from openv41.layers.batch import Batch
from openv41.layers.probe import Probe
from openv41.model.cache import DenseStore
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.plan import plan_layers

DECODED = slice(30, 34)  # of the text case's tokens, fed after the image case
EDGE, MIDDLE = 17, 24  # rows kept of wide tensors
_NAMED = ("embed", "logits", "engram_hash_ids")
_KEPT = ("expert_ids", "router_margin", "engram_gate", "topk_indices", "topk_margin")
_NOT_IN_QAT = ("embed", "vision_out", "aligner_out", "engram_gate", "out")


def trace_image(model: CausalEncoderDecoder, inputs: Inputs, mode: str) -> dict[str, Tensor]:
    """One forward over text and images, then a decode of text."""
    if model.vision is None or model.config.vision is None:
        raise InputError("case image needs a model with a vision encoder; this one has none")
    if inputs.images is None:
        raise InputError("case image needs an inputs file with image_ids; this one has none")
    images, ratio = inputs.images, model.config.vision.downsample_ratio
    grids = [ImageGrid(rows, cols, ratio) for rows, cols in images.sizes]
    parts, spans = images.patches.split([g.num_patches for g in grids]), []
    traced: dict[str, Tensor] = {}
    for number, (patches, grid) in enumerate(zip(parts, grids, strict=True)):
        encoded = model.vision.encoder(patches, [grid])  # alone, as the released code does
        cells = model.vision.projector(encoded, [grid])
        spans.append(model.vision.spans(cells, [grid]))
        traced |= {f"image{number}.vision_out": encoded, f"image{number}.aligner_out": cells}
    store, probe = DenseStore(model.config.compress_ratios), Probe()
    length = len(images.ids)
    output = model(Batch(images.ids, (0,), (0,), (length,), torch.cat(spans)), store, probe=probe)
    rows = _subset(length, mode)
    traced |= _forward_values(model, {**probe.values, "logits": model.logits(output.hidden)}, rows)
    traced |= _decode(model, store, inputs.text_ids[DECODED], length)
    if mode == "f32qat":
        traced = {name: value for name, value in traced.items() if leaf(name) not in _NOT_IN_QAT}
    return {name: as_stored(value) for name, value in traced.items()} | {
        "subset_positions": as_stored(rows)
    }


def _forward_values(
    model: CausalEncoderDecoder, seen: dict[str, Tensor], rows: Int[Tensor, " subset"]
) -> dict[str, Tensor]:
    """What is kept of the forward; of streams a subset of rows."""
    hashes = [value for name, value in seen.items() if leaf(name) == "engram_hash_ids"]
    if hashes:
        seen["engram_hash_ids"] = torch.stack(hashes, dim=1)
    kept = {name: seen[name] for name in _NAMED if name in seen}
    for plan in plan_layers(model.config):
        name = f"layers.{plan.layer}"
        own = {
            f"{name}.out": seen[f"{name}.out"][rows],
            f"{name}.router_margin": margin_of(
                seen[f"{name}.router_scores"], model.config.moe.top_k
            ),
        }
        if plan.is_index_source:
            own |= selection_margins(model, plan, seen, {})
            del own[f"{name}.index_score_row_last"]
        kept |= own | {f"{name}.{k}": seen[n] for k in _KEPT if (n := f"{name}.{k}") in seen}
    return kept


def _decode(
    model: CausalEncoderDecoder, store: DenseStore, ids: Int[Tensor, " _"], start: int
) -> dict[str, Tensor]:
    steps = [feed_tokens(model, store, one, start + i) for i, one in enumerate(ids.split(1))]
    return {"decode_ids": ids, "decode_logits": torch.stack([logits for logits, _ in steps])}


def _subset(length: int, mode: str) -> Int[Tensor, " subset"]:
    """Rows at both edges, and some between them; the golden "released" rows come from bfloat16."""
    dtype = torch.bfloat16 if mode == "released" else torch.float64
    middle = torch.linspace(EDGE - 1, length - EDGE, MIDDLE, dtype=dtype).round().long()
    edges = torch.arange(EDGE), torch.arange(length - EDGE, length)
    return torch.tensor(
        sorted({r for r in torch.cat([*edges, middle]).tolist() if 0 <= r < length})
    )
