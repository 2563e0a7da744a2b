"""The drafter after each token of a decode: the released reference's own outputs."""

import pytest
import torch

from tests.close import assert_close

pytestmark = [pytest.mark.golden, pytest.mark.slow]

BOUND = 2e-4  # README of the golden data
NAMES = ("dspark_base_logits", "dspark_logits", "dspark_confidence")


def test_drafts_are_equal(golden):
    got, want = golden.trace("decode", "f32"), golden.want("decode", "f32")
    assert torch.equal(got["dspark_tokens"], want["dspark_tokens"])
    for name in NAMES:
        assert_close(name, got[name], want[name], atol=BOUND)


def test_drafts_with_rounded_caches_stay_near(golden):
    got, want = golden.trace("decode", "f32qat"), golden.want("decode", "f32qat")
    same = (got["dspark_tokens"] == want["dspark_tokens"]).double().mean()
    assert same > 0.95
    for name in NAMES:
        assert (got[name] - want[name]).abs().mean() < 0.02, name
