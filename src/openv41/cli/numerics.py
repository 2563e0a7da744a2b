"""Names of the numerics on the command line."""

from enum import StrEnum


class Numerics(StrEnum):
    """Where the forward rounds, see docs/numerics.md."""

    F32 = "f32"
    F32QAT = "f32qat"
    RELEASED = "released"
    BF16QAT = "bf16qat"


class TracedNumerics(StrEnum):
    """Those that traces and the golden files have."""

    F32 = "f32"
    F32QAT = "f32qat"
    RELEASED = "released"
