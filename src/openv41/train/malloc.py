"""Memory allocation of a training process on a CPU."""

import ctypes
import platform

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc
KEEP_BYTES = 1 << 30
PAD_BYTES = 64 << 20


def keep_freed_memory() -> bool:
    """Let glibc keep freed blocks for the next tensor; returns whether that was possible.

    By default malloc takes big blocks from the system and gives them back after each operation;
    the page faults of touching fresh pages then cost about 30 % of a training step.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {
        M_MMAP_THRESHOLD: KEEP_BYTES,
        M_TRIM_THRESHOLD: KEEP_BYTES,
        M_TOP_PAD: PAD_BYTES,
    }
    return all(mallopt(name, value) for name, value in settings.items())
