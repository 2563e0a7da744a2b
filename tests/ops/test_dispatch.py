"""The rule that picks between an op's reference and its kernel."""

import pytest
import torch

from openv41.errors import ConfigError, KernelUnavailableError
from openv41.ops import _dispatch
from openv41.ops._dispatch import Kernel, kernels, op


class CudaTensor(torch.Tensor):
    """Says that it is on a CUDA device, so that the rule can be tested without one."""

    is_cuda = True


def on_cuda(x):
    return x.as_subclass(CudaTensor)


def tell(x, scale=1.0):
    return "reference"


def op_with_kernel(*, has_backward=False):
    told = op(tell)
    told.has_kernel_file = True
    odd = "the length is odd"
    told.kernel = Kernel(
        run=lambda x, scale=1.0: "kernel",
        refuse=lambda x, scale=1.0: odd if len(x) % 2 else None,
        has_backward=has_backward,
    )
    return told


@pytest.mark.parametrize(("mode", "want"), [("auto", "kernel"), ("reference", "reference")])
def test_kernel_runs_where_it_can_unless_the_mode_is_reference(mode, want):
    with kernels(mode):
        assert op_with_kernel()(on_cuda(torch.ones(2))) == want


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.ones(2), "an input is not on a CUDA device"),
        (on_cuda(torch.ones(3)), "the length is odd"),
        (on_cuda(torch.ones(2, requires_grad=True)), "the kernel has no backward"),
    ],
)
def test_refused_inputs_run_the_reference_or_raise_with_the_reason(x, reason):
    assert op_with_kernel()(x) == "reference"
    with kernels("required"), pytest.raises(KernelUnavailableError, match=f"tell: .* {reason}"):
        op_with_kernel()(x)


def test_kernel_with_a_backward_takes_inputs_that_want_a_gradient():
    x = on_cuda(torch.ones(2, requires_grad=True))
    assert op_with_kernel(has_backward=True)(x) == "kernel"
    with torch.no_grad():
        assert op_with_kernel()(x) == "kernel"


def test_op_without_a_kernel_file_runs_its_reference_in_every_mode():
    with kernels("required"):
        assert op(tell)(on_cuda(torch.ones(2))) == "reference"


def test_mode_is_restored_after_an_error():
    told = op_with_kernel()
    with pytest.raises(KernelUnavailableError), kernels("required"):
        told(torch.ones(2))
    assert told(torch.ones(2)) == "reference"


def test_unknown_mode_lists_the_known_ones(monkeypatch):
    monkeypatch.setattr(_dispatch, "_mode", "fast")  # as OPENV41_KERNELS=fast would
    with pytest.raises(ConfigError, match="is 'fast', must be one of auto, reference, required"):
        op(tell)(torch.ones(2))


@pytest.mark.compile
def test_dispatch_compiles_in_one_graph():
    double = op(lambda x: x + x)
    compiled = torch.compile(lambda x: double(x) * 3, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [6.0, 6.0]
