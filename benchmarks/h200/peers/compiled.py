"""Our own references under torch.compile: ``compiled:NAME`` takes the row's module."""

import torch

from benchmarks.h200 import harness
from benchmarks.h200.peers.case import Case, Shape
from openv41.ops import kernels

FOLDERS = ()


def case(name: str, shape: Shape) -> Case:
    """The reference of the row with this shape, compiled."""
    rows = [row for row in harness.declared(name).rows() if dict(row.shape) == dict(shape)]
    row = next(row for row in rows if row.reference is not None)
    inputs = row.make(torch.Generator("cuda").manual_seed(7))
    torch._dynamo.config.cache_size_limit = 64
    function = torch.compile(row.reference, dynamic=False)

    def run() -> object:
        with kernels("reference"):
            return function(**inputs)

    return Case(
        what=f"torch.compile of the reference (torch {torch.__version__})",
        run=run,
        error=lambda out: row.error(inputs, out),
        tolerance=row.tolerance,
    )
