"""What was measured for speculation, kept in files beside a checkpoint. Report §2.4.3.

A profile is true on the machine and with the program that it was measured with; temperatures are
true for the weights and the numerics. Both files say what that was.
"""

import hashlib
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from openv41.engine.cost_table import CostTable
from openv41.errors import InputError
from openv41.io.atomic import write_atomic
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder

PROFILE_FILE, CALIBRATION_FILE = "dspark_profile.json", "dspark_calibration.json"
SMALL = 1 << 16  # elements of a parameter that tells weights apart


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a measurement depends on."""

    device: str
    threads: int  # of torch on a CPU; 0 on another device
    torch: str
    openv41: str
    numerics: str
    config: str  # hash of the model's configuration
    weights: str  # hash of the model's small tensors, the confidence head's among them
    graphs: bool  # whether steps are replayed from CUDA graphs

    @classmethod
    def of(cls, model: CausalEncoderDecoder, *, graphs: bool = False) -> "Surroundings":
        """What holds here and now."""
        device = model.norm.weight.device
        return cls(
            device=_name_of(device),
            threads=torch.get_num_threads() if device.type == "cpu" else 0,
            torch=torch.__version__,
            openv41=version("openv41"),
            numerics=str(model.numerics),
            config=_digest(repr(model.config).encode()),
            weights=_weights(model),
            graphs=graphs,
        )

    def differences(self, other: "Surroundings", names: tuple[str, ...]) -> list[str]:
        """What is not the same here as in ``other``, of these fields."""
        return [
            f"{name} was {getattr(other, name)}, here it is {getattr(self, name)}"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]


PROFILE_NEEDS = ("device", "threads", "torch", "openv41", "numerics", "config", "graphs")
CALIBRATION_NEEDS = ("numerics", "config", "weights")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Temperatures of the confidences, and what they were fitted on."""

    temperatures: tuple[float, ...]
    rounds: int
    error_before: tuple[float, ...]  # expected calibration error of each draft's survival
    error_after: tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(0 < value < math.inf for value in self.temperatures):
            raise ValueError("a temperature is not above 0 and finite")
        if not len(self.temperatures) == len(self.error_before) == len(self.error_after):
            raise ValueError("temperatures and errors must have one entry for each draft")


def save_profile(path: Path, costs: CostTable, where: Surroundings) -> None:
    """Write a cost table."""
    _write(path, where, asdict(costs))


def save_calibration(path: Path, found: Calibration, where: Surroundings) -> None:
    """Write temperatures."""
    _write(path, where, asdict(found))


def load_profile(path: Path, here: Surroundings) -> CostTable:
    """Read a cost table; InputError if it was measured elsewhere or cannot be read."""
    values = _read(path, here, PROFILE_NEEDS, "profile")
    try:
        return CostTable(
            requests=tuple(values["requests"]),
            plain=tuple(values["plain"]),
            verify=tuple(tuple(times) for times in values["verify"]),
            tiers=tuple(values["tiers"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, error, "profile") from None


def load_calibration(path: Path, here: Surroundings) -> Calibration:
    """Read temperatures; InputError if they are of other weights or cannot be read."""
    values = _read(path, here, CALIBRATION_NEEDS, "calibrate")
    try:
        return Calibration(
            temperatures=_numbers(values["temperatures"]),
            rounds=int(values["rounds"]),
            error_before=_numbers(values["error_before"]),
            error_after=_numbers(values["error_after"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, error, "calibrate") from None


def _numbers(values: Sequence[float]) -> tuple[float, ...]:
    if isinstance(values, str):
        raise TypeError(f"{values!r} is no list")
    return tuple(map(float, values))


def _write(path: Path, where: Surroundings, values: Mapping[str, object]) -> None:
    whole = {"measured": asdict(where), **values}
    write_atomic(path, (json.dumps(whole, indent=1) + "\n").encode())


def _read(path: Path, here: Surroundings, needs: tuple[str, ...], command: str) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        measured = Surroundings(**values["measured"])
    except FileNotFoundError:
        raise InputError(
            f"{path}: there is no such file; 'openv41 dspark {command}' writes one"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error, command) from None
    if different := here.differences(measured, needs):
        raise InputError(
            f"{path}: measured elsewhere: {'; '.join(different)}. Run 'openv41 dspark {command}' "
            "here"
        )
    return values


def _unreadable(path: Path, error: Exception, command: str) -> InputError:
    return InputError(
        f"{path}: not what 'openv41 dspark {command}' writes ({type(error).__name__}: {error}); "
        "run it again"
    )


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor() if device.type == "cpu" else device.type


def _processor() -> str:
    table = Path("/proc/cpuinfo")
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} ({platform.machine()})"


def _weights(model: CausalEncoderDecoder) -> str:
    small = sorted((name, p) for name, p in model.named_parameters() if p.numel() <= SMALL)
    return _digest(
        b"".join(
            name.encode() + p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            for name, p in small
        )
    )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
