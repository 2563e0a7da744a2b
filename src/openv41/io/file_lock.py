"""One process at a time writes a file; the system frees the lock of one that died."""

import fcntl
import logging
import os
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)


def take_lock(file: IO[bytes], path: Path) -> bool:
    """Lock an open file until it is closed; False where another process holds it, or removed it.

    Where the file system knows no locks, a warning says so.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("%s cannot be locked (%s): let one process alone write there", path, error)
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
