"""What tells one checkpoint from another."""

import hashlib
from pathlib import Path

from openv41.errors import CheckpointError
from openv41.io.hf_config import FILE_NAME


def checkpoint_hash(folder: Path) -> str:
    """Hash of a checkpoint's configuration and weights, whatever the folder's name and times."""
    whole = hashlib.sha256()
    try:
        for file in [folder / FILE_NAME, *sorted(folder.glob("*.safetensors"))]:
            with file.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            whole.update(f"{file.name} {digest}\n".encode())
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot read the checkpoint: {error.strerror}; name a folder that 'train' "
            "or 'convert' wrote"
        ) from None
    return whole.hexdigest()
