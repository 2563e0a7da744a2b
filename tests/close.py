"""The one comparison of floating-point tensors."""

import torch


def assert_close(name, got, want, *, ulps=None, terms=1, rtol=None, atol=None):
    """Fail with the worst element unless |got - want| <= atol + rtol |want| everywhere.

    Give either ``rtol`` and ``atol``, or ``ulps``: then the tolerance follows from the dtype of
    ``got`` and the number of summed ``terms``, rtol = ulps * terms * eps, and atol is that share
    of the largest finite value of ``want``. NaN never passes; infinities must be equal.
    """
    got, want = torch.as_tensor(got), torch.as_tensor(want)
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    assert (ulps is None) != (rtol is None and atol is None), f"{name}: give ulps, or rtol and atol"
    wide = torch.float64
    if ulps is not None:
        rtol = ulps * terms * torch.finfo(got.dtype).eps
        finite = want.to(wide).abs().nan_to_num(0.0, 0.0, 0.0)
        atol = rtol * (finite.max().item() if finite.numel() else 0.0)
    got, want = got.detach().cpu().to(wide), want.detach().cpu().to(wide)
    bound = (atol or 0.0) + (rtol or 0.0) * want.abs().nan_to_num(0.0, 0.0, 0.0)
    error = (got - want).abs()
    bad = ~((error <= bound) | (got == want))
    if not bad.any():
        return
    excess = torch.where(bad, (error - bound).nan_to_num(float("inf")), float("-inf"))
    worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    raise AssertionError(
        f"{name}: {int(bad.sum())} of {bad.numel()} values differ; worst at {worst}: "
        f"got {got[worst].item():.9g}, want {want[worst].item():.9g}, "
        f"|difference| {error[worst].item():.3g}, allowed {bound[worst].item():.3g}"
    )
