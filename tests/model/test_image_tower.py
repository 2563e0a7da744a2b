"""Images in the whole model: span embeddings, their places, causality, routing, gradients."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from openv41.config import NumericsConfig
from openv41.errors import InputError
from openv41.image_grid import ImageGrid, SpanToken
from openv41.layers.batch import Batch
from openv41.layers.probe import Probe
from openv41.model.cache import DenseStore
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.init import init_weights
from openv41.model.prefill import PrefillMode, find_cut, layer_rows, prompt_rows
from tests.close import assert_close
from tests.layers.mini import IMAGE_TOKEN, mini_config, random_ids, run_oracle, token_map
from tests.model.image_mini import (
    GRIDS,
    STARTS,
    VISION,
    image_batch,
    image_ids,
    patches,
    seeing_model,
)
from tests.oracles import vision as vision_oracle

EXACT = NumericsConfig(deterministic=True)


@torch.no_grad()
def run(model, batch, **options):
    probe = Probe()
    output = model(batch, probe=probe, **options)
    return {**probe.values, "logits": model.logits(output.hidden)}


@torch.no_grad()
def test_span_embeddings_stand_as_the_layout_says():
    tower = seeing_model(1).vision
    cells = tower.projector(tower.encoder(patches(), GRIDS), GRIDS)
    layout = [token for grid in GRIDS for token in grid.layout()]
    got = tower(patches(), GRIDS)
    assert len(got) == len(layout) == 13
    marks = {
        SpanToken.START: tower.start,
        SpanToken.NEWLINE: tower.newline,
        SpanToken.END: tower.end,
    }
    rows = iter(cells)
    for token, row in zip(layout, got, strict=True):
        assert torch.equal(row, next(rows) if token is SpanToken.IMAGE else marks[token])
    assert next(rows, None) is None


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_image_is_the_same_alone_and_in_any_company(dtype):
    """To the bit in the deterministic mode; the others round in another order."""
    grids = [*GRIDS, ImageGrid(1, 1, 2), ImageGrid(5, 2, 2)]
    given = patches(grids, dtype).split([grid.num_patches for grid in grids])
    for numerics in (EXACT, NumericsConfig()):
        tower = seeing_model(2, dtype, numerics).vision
        alone = [tower(own, [grid]) for own, grid in zip(given, grids, strict=True)]
        for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 2, 1]):
            packed = tower(torch.cat([given[i] for i in order]), [grids[i] for i in order])
            parts = packed.split([grids[i].span_length for i in order])
            for place, i in enumerate(order):
                if numerics.deterministic:
                    assert torch.equal(parts[place], alone[i])
                else:
                    assert_close("packed", parts[place], alone[i], ulps=8, terms=8)


@torch.no_grad()
@pytest.mark.parametrize(("numerics", "want"), [(EXACT, [12, 6]), (NumericsConfig(), [18])])
def test_the_deterministic_mode_encodes_images_one_at_a_time(numerics, want):
    """Stock functions may round by the place in an array; so the bits hold on every device."""
    tower, passes = seeing_model(2, numerics=numerics).vision, []
    tower.encoder.register_forward_hook(lambda *args: passes.append(len(args[2])))
    tower(patches(), GRIDS)
    assert passes == want


@torch.no_grad()
@pytest.mark.parametrize("patch", [(0, 0), (0, 3), (1, 5), (4, 6), (3, 2)])
def test_a_bright_patch_lands_in_its_cell(patch):
    """Blocks that mix nothing; a grid that is not square, with a ragged edge."""
    tower, grid = seeing_model(3).vision, ImageGrid(5, 7, 2)
    for block in tower.encoder.blocks:
        for weight in (*block.attn.wo.parameters(), block.mlp.w2.weight):
            weight.zero_()
    given = torch.zeros(35, 3, 2, 2, dtype=torch.float64)
    dark = tower(given, [grid])
    given[patch[0] * 7 + patch[1]] = 1
    changed = (tower(given, [grid]) != dark).any(dim=1).nonzero().flatten().tolist()
    row, col = patch[0] // 2, patch[1] // 2
    assert changed == [1 + row * (4 + 1) + col]


@torch.no_grad()
def test_no_images():
    tower = seeing_model(4).vision
    assert tower(torch.zeros(0, 3, 2, 2), []).shape == (0, 16)


def test_rows_are_put_in_place():
    model = seeing_model(5)
    batch = image_batch(model)
    embed = run(model, batch)["embed"]
    inside = batch.token_ids == IMAGE_TOKEN
    assert torch.equal(embed[inside], batch.image_embeds)
    assert torch.equal(embed[~inside], model.embed.weight[batch.token_ids[~inside]])


def test_the_whole_model_against_loops():
    """Encoder, projector, delimiters and backbone, from patches to logits."""
    model, ids = seeing_model(19), image_ids()
    weights = {n: w.detach().numpy() for n, w in model.vision.named_parameters()}
    embed, first = model.embed.weight.detach().numpy()[ids], 0
    for grid, start in zip(GRIDS, STARTS, strict=True):
        own = patches()[first : first + grid.num_patches].numpy()
        first += grid.num_patches
        features = vision_oracle.encode(
            own, grid.rows, grid.cols, under("encoder.", weights), layers=2, heads=2, theta=50.0
        )
        project = under("projector.", weights)
        cells = vision_oracle.project(features, grid.rows, grid.cols, project, ratio=2)
        rows = np.split(cells, grid.cell_rows)
        span = [weights["start"], *(r for row in rows for r in (*row, weights["newline"]))]
        embed[start : start + grid.span_length] = [*span, weights["end"]]
    is_image = np.array(ids) == IMAGE_TOKEN
    want = run_oracle(model, ids, embed=embed, is_image=is_image)
    got = run(model, image_batch(model))
    for name in ("logits", "layers.4.after_engram", "layers.4.engram_gate", "layers.8.out"):
        assert_close(name, got[name], torch.from_numpy(want[name]), atol=1e-4)


def under(head, weights):
    return {n.removeprefix(head): w for n, w in weights.items() if n.startswith(head)}


def test_documents_with_images_equal_each_alone():
    model = seeing_model(5)
    texts = [image_ids(GRIDS[:1], (2,), 13), random_ids(7, 1), image_ids(GRIDS[1:], (0,), 9)]
    embeds = model.vision(patches(), GRIDS)
    together = run(model, Batch.from_documents(texts, image_embeds=embeds))["logits"]
    parts = together.split([13, 7, 9])
    for part, ids, own in zip(parts, texts, (embeds[:8], None, embeds[8:]), strict=True):
        alone = run(model, Batch.from_documents([ids], image_embeds=own))["logits"]
        assert_close("logits", part, alone, atol=1e-10)


@pytest.mark.parametrize("rows", [0, 12, 14])
def test_every_image_token_needs_its_row(rows):
    model = seeing_model(6)
    embeds = torch.zeros(rows, 16, dtype=torch.float64) if rows else None
    message = rf"13 image tokens \(id 63\) and {rows} rows of image_embeds; give one row per image"
    store = DenseStore(model.config.compress_ratios)
    with pytest.raises(InputError, match=message):
        model(Batch.from_documents([image_ids()], image_embeds=embeds), store)
    assert store.length(0) == 0
    text = Batch.from_documents([[4, 5]], image_embeds=torch.zeros(1, 16, dtype=torch.float64))
    with pytest.raises(InputError, match=r"0 image tokens \(id 63\) and 1 rows of image_embeds"):
        model(text)


def test_rows_must_be_as_wide_as_the_model():
    model = seeing_model(6)
    embeds = torch.zeros(13, 15, dtype=torch.float64)
    with pytest.raises(InputError, match="15 wide, the model's hidden size is 16"):
        model(Batch.from_documents([image_ids()], image_embeds=embeds))


def moved(before, after):
    """Rows of the streams of any layer, or of the logits, that differ in a bit."""
    names = [n for n in before if n == "logits" or n.endswith(".out")]
    assert len(names) == 10
    rows = [(before[n] != after[n]).flatten(1).any(dim=1) for n in names]
    return torch.stack(rows).any(dim=0).nonzero().flatten().tolist()


@pytest.mark.parametrize("row", [0, 3, 7, 8, 12])
def test_span_positions_are_causal(row):
    """Also within a span, and in the sliding window."""
    model = seeing_model(7, torch.float32, EXACT)
    batch = image_batch(model)
    position = [i for i, token in enumerate(image_ids()) if token == IMAGE_TOKEN][row]
    embeds = batch.image_embeds.clone()
    embeds[row] += 1
    changed = moved(run(model, batch), run(model, replace(batch, image_embeds=embeds)))
    assert changed[0] == position
    assert position + 1 in changed


def test_the_last_patch_of_an_image_moves_its_span_and_nothing_before():
    model = seeing_model(8, torch.float32, EXACT)
    given = patches(dtype=torch.float32)
    other = given.clone()
    other[-1] += 1
    changed = moved(run(model, image_batch(model, given)), run(model, image_batch(model, other)))
    assert changed[0] == STARTS[1] + 1  # the first cell: patches see each other, START sees none


def test_text_before_an_image_does_not_know_it():
    model = seeing_model(8, torch.float32, EXACT)
    ids = image_ids()
    text = run(model, Batch.from_documents([ids[: STARTS[0]]]))["logits"]
    assert torch.equal(run(model, image_batch(model))["logits"][: STARTS[0]], text)


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 6])
def test_a_span_is_the_same_at_every_offset(offset):
    """No padding to groups; the tokens before it are all that differs."""
    model = seeing_model(9)
    grid = GRIDS[0]
    ids = [*random_ids(offset, 2), *[IMAGE_TOKEN] * grid.span_length]
    embeds = model.vision(patches()[: grid.num_patches], [grid])
    seen = run(model, Batch.from_documents([ids], image_embeds=embeds))
    assert torch.equal(seen["embed"][offset:], embeds)
    assert len(ids) == offset + 8
    groups = (offset + 8) // 2
    assert len(seen["layers.2.main_kv"]) == groups


@pytest.mark.parametrize("cut", [1, 5, 6, 9, 12, 13, 17, 19, 21, 22, 29])
def test_a_prefill_may_be_cut_inside_a_span(cut):
    model = seeing_model(10)
    whole = image_batch(model)
    want = run(model, whole)["logits"]
    store, ids = DenseStore(model.config.compress_ratios), whole.token_ids
    split = int((ids[:cut] == IMAGE_TOKEN).sum())
    rows = (whole.image_embeds[:split], whole.image_embeds[split:])
    first = Batch(ids[:cut], (0,), (0,), (cut,), rows[0])
    rest = Batch(ids[cut:], (0,), (cut,), (30 - cut,), rows[1])
    got = torch.cat([run(model, part, store=store)["logits"] for part in (first, rest)])
    assert_close("logits", got, want, atol=1e-9)


def test_a_prefill_that_ends_rows_early_agrees():
    """Exact CED prefill of a prompt that ends inside the second image."""
    model, length = seeing_model(11), 20
    ids = image_ids()[:length]
    embeds = model.vision(patches(), GRIDS)[: ids.count(IMAGE_TOKEN)]
    batch = Batch.from_documents([ids], image_embeds=embeds)
    cut, _ = find_cut(model.config)
    prompt = prompt_rows(model.config, PrefillMode.EXACT, length, cut=cut)
    assert not prompt.is_whole()
    rows = layer_rows(model.config, {0: prompt})
    store = DenseStore(model.config.compress_ratios)
    got = run(model, batch, store=store, rows=rows)["logits"]
    assert_close("last", got[-1], run(model, batch)["logits"][-1], atol=1e-9)


def test_whole_spans_are_routed_by_the_image_bias():
    """Text by {0, 1}, spans with their delimiters by {2, 3}; weights from the raw scores."""
    model = seeing_model(12)
    favoured = ([9.0, 9, 0, 0, 0], [0.0, 0, 9, 9, 0])
    with torch.no_grad():
        for layer in model.layers:
            layer.moe.gate.bias.copy_(torch.tensor(favoured[0]))
            layer.moe.gate.bias_vl.copy_(torch.tensor(favoured[1]))
    batch = image_batch(model)
    seen = run(model, batch)
    is_image = batch.token_ids == IMAGE_TOKEN
    for number in range(9):
        chosen = seen[f"layers.{number}.expert_ids"].sort(dim=1).values
        assert (chosen[is_image] == torch.tensor([2, 3])).all()
        assert (chosen[~is_image] == torch.tensor([0, 1])).all()
        bias = torch.where(is_image[:, None], *(torch.tensor(favoured)[[1, 0], None]))
        raw = seen[f"layers.{number}.router_scores"] - bias
        picked = raw.gather(1, seen[f"layers.{number}.expert_ids"].long())
        want = 1.5 * picked / picked.sum(dim=1, keepdim=True)
        assert_close("weights", seen[f"layers.{number}.expert_weights"], want, atol=1e-9)
    counts = model(batch).expert_counts[0]
    assert counts.tolist() == [[17, 17, 0, 0, 0], [0, 0, 13, 13, 0]]


def test_the_ids_of_image_positions_reach_nothing():
    """Neither their embedding row nor their compressed id; n-grams stop at a span."""
    model = seeing_model(13, torch.float32, EXACT)
    batch = image_batch(model)
    before = run(model, batch)
    with torch.no_grad():
        model.embed.weight[IMAGE_TOKEN] = torch.nan
    model.token_map[IMAGE_TOKEN] = 3
    after = run(model, batch)
    for name in ("logits", *(f"layers.{i}.engram_hash_ids" for i in (1, 4))):
        assert torch.equal(after[name], before[name]), name
    inside = (batch.token_ids == IMAGE_TOKEN).nonzero().flatten()
    for number in (1, 4):
        assert (before[f"layers.{number}.engram_gate"][inside] == 0).all()
        at_layer = before[f"layers.{number - 1}.out"][inside]
        assert torch.equal(before[f"layers.{number}.after_engram"][inside], at_layer)
        hashes = before[f"layers.{number}.engram_hash_ids"]
        assert (hashes[inside] == hashes[inside[0]]).all()  # nothing but padding


def test_an_n_gram_behind_an_image_is_one_of_a_new_text():
    model = seeing_model(14)
    hashes = run(model, image_batch(model))["layers.1.engram_hash_ids"]
    stop = STARTS[0] + GRIDS[0].span_length
    behind = image_ids()[stop : STARTS[1]]
    alone = run(model, Batch.from_documents([behind]))["layers.1.engram_hash_ids"]
    assert torch.equal(hashes[stop : STARTS[1]], alone)


@torch.no_grad()
def test_every_vision_tensor_matters():
    tower = seeing_model(15).vision
    want = tower(patches(), GRIDS)
    names = dict(tower.named_parameters())
    assert len(names) == 2 + 2 * 8 + 1 + 4 + 3
    for name, weight in names.items():
        kept = weight.clone()
        weight.add_(0.1 * torch.randn_like(weight))
        assert (tower(patches(), GRIDS) - want).abs().max() > 1e-6, name
        weight.copy_(kept)


def test_gradients_reach_patches_and_every_vision_tensor():
    model = seeing_model(16)
    given = patches().requires_grad_()
    output = model(image_batch(model, given))
    model.logits(output.hidden)[-1].logsumexp(-1).backward()
    assert (given.grad.flatten(1).abs().amax(dim=1) > 0).all()
    for name, weight in model.vision.named_parameters():
        assert weight.grad.abs().max() > 0, name
    row = model.embed.weight.grad[IMAGE_TOKEN]
    assert not row.any()


def test_the_gradient_of_a_delimiter_is_right():
    model = seeing_model(17)
    tower = model.vision

    def loss():
        return model.logits(model(image_batch(model)).hidden).logsumexp(-1).sum()

    loss().backward()
    for mark in (tower.start, tower.newline, tower.end):
        step = torch.zeros_like(mark)
        step[5] = 1e-6
        with torch.no_grad():
            mark.add_(step)
            above = loss()
            mark.sub_(2 * step)
            below = loss()
            mark.add_(step)
        want = (above - below).item() / 2e-6
        assert mark.grad[5].item() == pytest.approx(want, rel=1e-4, abs=1e-6)


def test_text_does_not_notice_that_the_model_can_see():
    """Same text weights with and without the image part."""
    seeing = seeing_model(18)
    blind = CausalEncoderDecoder(mini_config(), dtype=torch.float64)
    blind.set_token_map(token_map())
    assert blind.vision is None
    text = {n: t for n, t in seeing.state_dict().items() if not n.startswith("vision.")}
    blind.load_state_dict(text)
    batch = Batch.from_documents([random_ids(21)])
    got, want = run(seeing, batch), run(blind, batch)
    assert got.keys() == want.keys()
    assert torch.equal(got["logits"], want["logits"])


def test_initial_values():
    model = CausalEncoderDecoder(replace(mini_config(), vision=VISION))
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.nan)
    init_weights(model, 3)
    for name, weight in model.vision.named_parameters():
        leaf = name.rpartition(".")[2]
        if "norm" in name:
            assert (weight == 1).all(), name
        elif leaf == "bias":
            assert (weight == 0).all(), name
        else:
            assert 0.005 < weight.std() < 0.04, name
