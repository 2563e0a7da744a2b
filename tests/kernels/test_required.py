"""The smallest benchmark row of each op on a GPU: its kernel is required, and right."""

import pytest
import torch

from benchmarks.h200.candidates import poisoned_run
from benchmarks.h200.harness import declared, modules
from openv41.ops import kernels

pytestmark = pytest.mark.gpu


class Device:
    """What the check needs of a clock."""

    def wait(self):
        torch.cuda.synchronize()


def smallest_rows():
    """One row for each op, the one that moves the fewest bytes."""
    found = {}
    for name in modules():
        for row in declared(name).rows():
            known = found.get(row.op)
            if known is None or row.floor_bytes < known.floor_bytes:
                found[row.op] = row
    return found.values()


@pytest.mark.parametrize("row", smallest_rows(), ids=lambda row: row.op)
def test_the_kernel_is_required_and_right(row):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    inputs = row.make(torch.Generator("cuda").manual_seed(3))

    def run():
        with kernels("required"):
            return row.ours(**inputs)

    outputs = poisoned_run(Device(), run)
    with kernels("reference"):
        assert row.error(inputs, outputs) <= row.tolerance
