"""The comparison itself must be able to fail."""

import pytest
import torch

from tests.close import assert_close


def test_worst_element_is_named():
    got, want = torch.tensor([[1.0, 2.0], [3.5, 4.1]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    with pytest.raises(AssertionError, match=r"x: 2 of 4 .*; worst at \(1, 0\): got 3.5"):
        assert_close("x", got, want, rtol=0.0, atol=1e-3)


def test_ulps_scale_with_the_dtype_and_the_number_of_terms():
    want = torch.ones(4)
    off = want + 6 * torch.finfo(torch.float32).eps
    assert_close("x", off, want, ulps=1, terms=4)  # atol and rtol, both 4 eps
    with pytest.raises(AssertionError, match="4 of 4 values differ"):
        assert_close("x", off, want, ulps=1)


def test_nan_fails_and_equal_infinities_pass():
    inf = torch.tensor([float("inf"), float("-inf")])
    assert_close("x", inf, inf, ulps=1)
    with pytest.raises(AssertionError, match="1 of 2 values differ"):
        assert_close("x", inf, inf.abs(), ulps=1)
    nan = torch.tensor([float("nan")])
    with pytest.raises(AssertionError, match="1 of 1 values differ"):
        assert_close("x", nan, nan, ulps=1)


def test_shapes_are_not_broadcast():
    with pytest.raises(AssertionError, match=r"x: shape \(1,\), want \(2,\)"):
        assert_close("x", torch.ones(1), torch.ones(2), ulps=1)
