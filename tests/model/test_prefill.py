"""Which rows of a prompt each layer computes."""

from dataclasses import replace

import pytest

from openv41.errors import InputError
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.flops import prompt_flops
from openv41.model.prefill import (
    PrefillMode,
    ReplayVariant,
    find_cut,
    first_needed,
    layer_rows,
    prompt_rows,
)
from openv41.presets import released, thin
from tests.layers.mini import mini_config


def test_exact_rows_on_paper():
    """Window 4, 9 layers, cut 5: the last row of 20, then 3 rows more in each layer below."""
    rows = prompt_rows(mini_config(), PrefillMode.EXACT, 20, cut=5)
    assert rows.firsts == (0, 0, 0, 0, 0, 10, 13, 16, 19)
    assert rows.start == 0


def test_bounded_rows_on_paper():
    rows = prompt_rows(mini_config(), PrefillMode.BOUNDED, 20, cut=5)
    assert rows.firsts == (0, 0, 0, 0, 0, 16, 16, 16, 16)
    assert not rows.cut_ends_window
    short = prompt_rows(mini_config(), PrefillMode.BOUNDED, 3, cut=5)
    assert short.is_whole()
    ends = prompt_rows(
        mini_config(), PrefillMode.BOUNDED, 20, cut=5, variant=ReplayVariant.ALL_BOUNDED
    )
    layers = layer_rows(mini_config(), {7: ends})
    assert [layer.windows_end for layer in layers] == [False] * 5 + [True] + [False] * 3
    assert layers[6].aligned((3, 7)) == (0, 16)


def test_a_replay_reaches_through_every_window():
    """30 of 40 known: layer 8 needs rows from 30 on, every layer below 3 more."""
    rows = prompt_rows(mini_config(), PrefillMode.FULL, 40, cut=5, known=30)
    assert rows.firsts == (6, 9, 12, 15, 18, 21, 24, 27, 30)
    assert rows.start == 2, (
        "3 rows before 6 give layer 0 its window; groups begin at even positions"
    )
    exact = prompt_rows(mini_config(), PrefillMode.EXACT, 40, cut=5, known=30)
    assert exact.firsts == (15, 18, 21, 24, 27, 30, 33, 36, 39)
    assert exact.start == 12
    late = prompt_rows(mini_config(), PrefillMode.EXACT, 60, cut=5, known=30)
    assert late.firsts == (18, 21, 24, 27, 30, 50, 53, 56, 59)
    restored = prompt_rows(mini_config(), PrefillMode.EXACT, 60, cut=5, known=30, restored=28)
    assert restored.firsts == (28, 28, 28, 28, 30, 50, 53, 56, 59)
    assert restored.start == 28
    bounded = prompt_rows(mini_config(), PrefillMode.BOUNDED, 60, cut=5, known=31)
    assert bounded.start == 26
    assert bounded.firsts == (26,) * 5 + (56,) * 4


def test_rows_of_the_released_schedule():
    needed = first_needed(released(), 8192, 20, 0)
    assert needed[39] == 8191
    assert needed[20] == 8191 - 19 * 127
    assert needed[19] == 0


@pytest.mark.parametrize(
    ("change", "cut", "reason"),
    [
        ({"kv_sources": (), "index_sources": (), "compress_ratios": (0,) * 9}, None, "main KV"),
        ({}, 3, "layer 5 above the cut at 3 is a kv source"),
        ({}, 6, "layer 6 reads a selection that is made below the cut"),
    ],
)
def test_layouts_that_cannot_be_cut(change, cut, reason):
    config = mini_config()
    if change:
        config = replace(config, **change, engram=None)
    found, why = find_cut(config, cut)
    assert found is None
    assert reason in why


def test_an_engram_above_the_cut():
    config = mini_config()
    engram = replace(config.engram, layer_ids=(1, 6))
    found, reason = find_cut(replace(config, engram=engram))
    assert found is None
    assert reason == "layer 6, not below the cut at 5, has an Engram"
    assert find_cut(config) == (5, "")
    assert find_cut(config, 7) == (7, "")
    with pytest.raises(InputError, match="prefill cut is layer 9; the model has 9 layers"):
        find_cut(config, 9)


def test_operations_by_mode():
    """On the released schedule nearly half the work is left; counted, not by a closed formula."""
    model = CausalEncoderDecoder(thin(), device="meta")
    rows = {m: prompt_rows(thin(), m, 2048, cut=20) for m in PrefillMode}
    work = {m: prompt_flops(model, r, 2048) for m, r in rows.items()}
    assert 1.85 < work["full"] / work["bounded"] < 2
    assert work["bounded"] < work["exact"] < work["full"]
    one = prompt_rows(thin(), PrefillMode.FULL, 1, cut=20)
    assert prompt_flops(model, one, 1) > 2 * model.head.weight.numel()
