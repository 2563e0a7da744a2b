"""Agreement with the peers on random checkpoints in the released format.

Where a peer chooses other entries than ours, the row is listed with the gap between the scores of
the two choices (0 is an exact tie, which may be broken either way), and ours is run once more with
the peer's choices: the logits must then agree in every row.
"""

import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from openv41.io.fixture import FixtureOptions, make_fixture

SEEDS = (0, 1, 2)
BOUND = 2e-4  # max abs of float32 logits
TIE = 1e-5


def agreement_lines(ours, peers, goldens):
    """Yield one line per peer and checkpoint. `peers` maps a name to (class, version)."""
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "fixture"
            make_fixture(made, FixtureOptions(seed=seed, ties=False, outputs=False))
            yield from _compare(ours, peers, made, {"checkpoint": "fixture", "seed": seed})
    for golden in goldens:
        expected = load_file(golden / "prefill_f32.safetensors")["logits"]
        what = {"checkpoint": f"golden {golden.name}"}
        with tempfile.TemporaryDirectory() as folder:  # loading may keep a token map there
            made = shutil.copytree(golden, Path(folder) / golden.name)
            yield from _compare(ours, peers, made, what, expected)


def _compare(ours, peers, made, what, expected=None):
    ids = load_file(made / "inputs.safetensors")["text_ids"].tolist()
    folder = made / "checkpoint"
    own_model = ours(folder)
    own, values = own_model.choices(ids)
    for name, (peer, version) in peers.items():
        logits, choices = peer(folder).choices(ids)
        forced, _ = own_model.choices(ids, {k: _as_ours(v, values[k]) for k, v in choices.items()})
        gaps = _differing(values, choices, own_model.config.indexer)
        same = _max_abs(forced, logits)
        line = what | {"peer": name, "version": version, "tokens": len(ids)}
        line |= {"logits_max_abs": _max_abs(own, logits), "logits_max_abs_same_choices": same}
        line |= {"logits_largest": own.abs().max().item(), "bound": BOUND}
        line |= {"choices_compared": sorted(choices), "differing_choices": gaps}
        if expected is not None:
            line["peer_to_golden_max_abs"] = _max_abs(logits, expected)
            line["ours_to_golden_max_abs"] = _max_abs(own, expected)
        line["agrees"] = same <= BOUND and all(g["score_gap"] <= TIE for g in gaps)
        yield line


def _max_abs(a, b):
    return (a - b).abs().max().item()


def _as_ours(chosen, like):
    """Entries ascending with -1 last, experts as they come."""
    top = torch.iinfo(torch.int64).max
    chosen = torch.where(chosen < 0, top, chosen).sort(-1).values
    return torch.where(chosen == top, -1, chosen).to(like.dtype)


def _differing(values, choices, indexer):
    """List rows whose choice is another set: layer, row, both sides, gap of the scores."""
    lines = []
    for name, theirs in choices.items():
        for row in range(len(theirs)):
            mine, other = set(values[name][row].tolist()), set(theirs[row].tolist())
            if mine != other:
                pair = {"only_ours": sorted(mine - other), "only_peer": sorted(other - mine)}
                gap = _gap(values, name, row, pair, indexer)
                lines.append({"choice": name, "row": row, "score_gap": gap} | pair)
    return lines


def _gap(values, name, row, pair, indexer):
    """Smallest difference between the two sides, by own scores or by the candidate blocks'."""
    layer, _, kind = name.removeprefix("layers.").partition(".")
    scores = values[
        f"layers.{layer}." + ("router" if kind == "expert_ids" else "index") + "_scores"
    ]
    gaps = _distances(scores[row], pair)
    source = indexer.candidate_source
    if kind == "topk_indices" and int(layer) > source:
        row_scores = values[f"layers.{source}.index_scores"][row].clone()
        newest = row + 1  # the decoder keeps an entry per token
        blocks = row_scores[:newest].split(indexer.block_size)
        best = torch.stack([b.max() for b in blocks]).repeat_interleave(indexer.block_size)
        gaps += _distances(best, pair)
    return min(gaps, default=float("inf"))


def _distances(scores, pair):
    sides = [i for i in pair["only_ours"] if i >= 0], [i for i in pair["only_peer"] if i >= 0]
    return [abs((scores[i] - scores[j]).item()) for i in sides[0] for j in sides[1]]
