"""Tests of one xdist group run in one process: what one of them computes, the others reuse."""

import pytest


@pytest.mark.xdist_group("of one")
def test_groups_reach_the_scheduler(request):
    """It finds them at the end of a test's name."""
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("needs --dist loadgroup: make test")
    assert request.node.nodeid.endswith("@of one")
