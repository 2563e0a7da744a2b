"""The layer plan, report §2.2 and §2.3.1."""

from dataclasses import replace

import pytest

from openv41.plan import Mode, plan_layers
from openv41.presets import PRESETS, preset, released, thin, tiny

RELEASED_FULL, RELEASED_REINDEX = {2, 8, 14, 20}, {24, 28, 32, 36}


def layers_where(plans, keep):
    return {plan.layer for plan in plans if keep(plan)}


@pytest.mark.parametrize("build", [released, thin])
def test_released_schedule_has_the_published_modes(build):
    plans = plan_layers(build())
    assert [plan.layer for plan in plans] == list(range(40))
    assert layers_where(plans, lambda p: p.mode is Mode.WINDOW) == {0, 1}
    assert layers_where(plans, lambda p: p.mode is Mode.FULL) == RELEASED_FULL
    assert layers_where(plans, lambda p: p.mode is Mode.REINDEX) == RELEASED_REINDEX
    assert layers_where(plans, lambda p: p.mode is Mode.REUSE) == set(range(2, 40)) - (
        RELEASED_FULL | RELEASED_REINDEX
    )
    assert [plan.ratio for plan in plans] == [0, 0, *[2] * 18, *[1] * 20]


def test_released_layers_read_the_latest_source():
    plans = plan_layers(released())
    want = [-1, -1, *[2] * 6, *[8] * 6, *[14] * 6, *[20] * 20]
    assert [plan.kv_source for plan in plans] == want
    index = [-1, -1, *[2] * 6, *[8] * 6, *[14] * 6]
    index += [s for s in (20, 24, 28, 32, 36) for _ in range(4)]
    assert [plan.index_source for plan in plans] == index


def test_released_candidates_engram_and_taps():
    plans = plan_layers(released())
    assert layers_where(plans, lambda p: p.publishes_candidates) == {20}
    assert layers_where(plans, lambda p: p.uses_candidates) == RELEASED_REINDEX
    assert layers_where(plans, lambda p: p.has_engram) == {1, 14}
    assert layers_where(plans, lambda p: p.is_tap) == {37, 38, 39}
    assert layers_where(plans, lambda p: p.is_kv_source) == RELEASED_FULL
    assert layers_where(plans, lambda p: p.is_index_source) == RELEASED_FULL | RELEASED_REINDEX


def test_encoder_reindex_layers_are_not_restricted():
    plans = plan_layers(tiny())
    assert plans[3].mode is Mode.REINDEX
    assert (plans[3].kv_source, plans[3].index_source) == (1, 3)
    assert not plans[3].uses_candidates
    assert plans[6].uses_candidates
    assert (plans[6].kv_source, plans[7].index_source) == (4, 6)


def test_several_full_decoder_layers_are_planned_each_for_itself():
    config = replace(tiny(), kv_sources=(1, 4, 6))
    plans = plan_layers(config)
    assert [plan.kv_source for plan in plans] == [-1, 1, 1, 1, 4, 4, 6, 6]
    assert layers_where(plans, lambda p: p.publishes_candidates) == {4}
    assert layers_where(plans, lambda p: p.uses_candidates) == set()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_covers_every_mode(name):
    modes = {plan.mode for plan in plan_layers(preset(name))}
    assert modes == set(Mode)
