"""The ``--device`` option."""

import torch

from openv41.errors import InputError


def resolve_device(name: str) -> torch.device:
    """Take a device by its name, once it has proved that it holds numbers."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # the latter: torch built without it
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"--device is {name!r}, which cannot be used here ({reason}); cpu always can"
        ) from None
    return device
