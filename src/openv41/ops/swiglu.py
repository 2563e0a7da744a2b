"""SwiGLU with clamped inputs. Report §2.1.1."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from openv41.ops._dispatch import op
from openv41.ops.deterministic import elementwise
from openv41.ops.precision import cast, widened


@op
def clamped_swiglu(
    gate: Float[Tensor, "T F"],
    up: Float[Tensor, "T F"],
    limit: float,
    weight: Float[Tensor, " T"] | None = None,
    *,
    deterministic: bool = False,
) -> Float[Tensor, "T F"]:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) * weight, in at least float32."""
    gate_input = widened(gate).clamp(max=limit)
    act = elementwise(gate_input, F.silu) if deterministic else F.silu(gate_input)
    out = act * cast(up, act.dtype).clamp(-limit, limit)
    if weight is not None:
        out = out * cast(weight, out.dtype)[:, None]
    return cast(out, gate.dtype)
