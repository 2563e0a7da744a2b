"""How several processes share the parameters of a run: all of it in one file. Report §2.5.

Layers know nothing of it. Every layer, the embedding and the head are sharded by FSDP2, by rows;
rows of n-gram tables have an owner that looks them up for all; experts are sharded as the rest, or
whole experts have an owner that tokens travel to. The vision encoder, the drafter and the routing
biases are the same in every process. A gradient is the sum over all processes: each has divided its
losses by what all of them count. A run of one process does not import this file.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from openv41 import ops
from openv41.config import ModelConfig
from openv41.errors import ConfigError
from openv41.layers.experts import MixtureOfExperts, RoutedExperts
from openv41.layers.quantized_linear import QuantizedTable
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.train.placement import ExpertPlacement, Placed, Placement, StageModel
from openv41.train.processes import Processes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardedParameter(Placed):
    """A parameter that FSDP2 has cut by rows."""

    def take_gradient(self) -> None:
        """Give ``local`` the gradient that the last backward pass left in the module."""
        gradient = self.parameter.grad
        assert gradient is None or isinstance(gradient, DTensor), f"{self.name}: {gradient}"
        self.local.grad = None if gradient is None else gradient.to_local()


@dataclass(frozen=True, slots=True, eq=False)
class SharedPlacement(Placement):
    """All parameters of a model that several processes share."""

    mesh: DeviceMesh  # of one dimension

    def whole(self, placed: Placed) -> Tensor:
        """A parameter with the rows of all processes, which must all ask for it."""
        tensor = self.as_distributed(placed, placed.local.detach())
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def as_distributed(self, placed: Placed, local: Tensor) -> Tensor:
        """A tensor of own rows as a part of the whole one, such as a buffer of an optimizer."""
        if not placed.is_split:
            return local
        stride = torch.empty(placed.shape, device="meta").stride()
        return DTensor.from_local(
            local, self.mesh, [Shard(0)], run_check=False, shape=placed.shape, stride=stride
        )

    def sum_copies(self) -> None:
        """Add up the gradients of parameters that every process holds whole."""
        copies = [p.local for p in self.parameters if not p.is_split and p.local.requires_grad]
        if not copies:
            return
        device = copies[0].device
        used = torch.tensor([p.grad is not None for p in copies], device=device).int()
        self.processes.max_(used)
        for parameter, is_used in zip(copies, used.tolist(), strict=True):
            if is_used:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self.processes.sum_(parameter.grad)


def share(model: StageModel, processes: Processes, experts: ExpertPlacement) -> Placement:
    """Distribute a model among several processes: see ``distribute``."""
    check_placement(model.config, processes, experts)
    assert isinstance(model, CausalEncoderDecoder), "stages of the encoder run in one process"
    shapes = {name: p.shape for name, p in model.named_parameters()}
    owned = set(_give_owners(model, processes, experts))
    copied = {p for name, p in model.named_parameters() if _is_copied(name)}
    mesh = init_device_mesh(processes.device.type, (processes.size,))
    # A layer hands on views (its coefficients), and nothing works on them in place: gradients are
    # those of one process, see tests/train/test_parallel.py.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDPLayer\) returned a view")
    for unit in (*model.layers, model.head, model):
        fully_shard(unit, mesh=mesh, ignored_params=owned | copied)
    register_fsdp_forward_method(model.head, "loss")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    placed = (_placed(n, p, shapes[n], processes, owned) for n, p in model.named_parameters())
    return SharedPlacement(model.config, processes, tuple(placed), mesh)


def check_placement(model: ModelConfig, processes: Processes, experts: ExpertPlacement) -> None:
    """Raise ConfigError, with what is supported, for a mix that is not."""
    if experts == "parallel" and model.moe.num_experts % processes.size:
        raise ConfigError(
            "parallel",
            [
                f"{model.moe.num_experts} experts cannot be shared evenly by {processes.size} "
                "processes; take a number of processes that divides them, or --experts sharded. "
                "supported: one group of processes that shards all layers (FSDP2) and rows of "
                "n-gram tables, with experts sharded too, or parallel; each with images, "
                "accumulation and activation checkpointing"
            ],
        )


class ParallelExperts(RoutedExperts):
    """The experts of one process; rows of all processes travel to them and back."""

    def __init__(self, whole: RoutedExperts, processes: Processes) -> None:
        first, stop = processes.rows(whole.moe.num_experts)
        weight = whole.w1.weight
        assert weight is not None, "experts that are stored codes cannot be trained"
        moe = replace(whole.moe, num_experts=stop - first)
        made: Any = {"device": weight.device, "dtype": weight.dtype}
        super().__init__(weight.shape[2], moe, whole.numerics, **made)
        self.processes, self.num_all = processes, whole.moe.num_experts
        for own, all_ in zip(self.stacks(), whole.stacks(), strict=True):
            assert own.weight is not None and all_.weight is not None, "stored codes"  # noqa: PT018
            own.weight.data.copy_(all_.weight.data[first:stop])

    def forward(
        self, x: Float[Tensor, "T D"], expert_ids: Int[Tensor, "T A"], weights: Float[Tensor, "T A"]
    ) -> Float[Tensor, "T D"]:
        """Sum of the chosen experts' weighted outputs, at least float32."""
        processes, top_k = self.processes, expert_ids.shape[1]
        order, counts = ops.sort_by_expert(expert_ids, self.num_all)
        sizes = counts.tolist()
        received = _share_counts(processes, sizes)  # [process, own expert]
        send = torch.tensor(sizes).view(processes.size, -1).sum(dim=1).tolist()
        receive = received.sum(dim=1).tolist()
        rows = processes.exchange(ops.take_pairs(x, order, top_k), send, receive)
        shares = processes.exchange(weights.flatten().index_select(0, order), send, receive)
        expert_of = torch.arange(self.moe.num_experts).repeat(processes.size)
        by_expert = (
            expert_of.repeat_interleave(received.flatten()).argsort(stable=True).to(x.device)
        )
        if len(rows):
            per_expert = received.sum(dim=0).to(x.device)
            outputs = self.feed(rows[by_expert], per_expert, shares[by_expert])
            rows = torch.empty_like(outputs).index_copy(0, by_expert, outputs)
        else:  # the backward pass exchanges gradients here too
            rows = rows * shares[:, None]
        return ops.combine(processes.exchange(rows, receive, send), order, top_k)


class OwnedTable(QuantizedTable):
    """The rows of an n-gram table that one process owns; it looks them up for all others."""

    def __init__(self, whole: QuantizedTable, processes: Processes) -> None:
        assert whole.weight is not None, "a table that is stored codes cannot be trained"
        weight = whole.weight
        self.first, stop = processes.rows(len(weight))
        self.each = -(-len(weight) // processes.size)
        shape = stop - self.first, weight.shape[1]
        made: Any = {"device": weight.device, "dtype": weight.dtype}
        super().__init__(*shape, weight_format=whole.weight_format, **made)
        assert self.weight is not None, "just made"
        self.weight.data.copy_(weight.data[self.first : stop])
        self.processes = processes

    def forward(
        self, rows: Int[Tensor, "T lookups"], dtype: torch.dtype
    ) -> Float[Tensor, "T lookups width"]:
        """Look rows up, each once, as values of ``dtype``."""
        assert self.weight is not None, "an owned table is never stored codes"
        asked, places = rows.unique(return_inverse=True)
        send = (asked // self.each).bincount(minlength=self.processes.size).tolist()
        receive = self.processes.share_counts(send)
        wanted = self.processes.exchange(asked, send, receive) - self.first
        found = nn.functional.embedding(wanted, self.weight)
        return self.processes.exchange(found, receive, send)[places].to(dtype)


def _give_owners(
    model: CausalEncoderDecoder, processes: Processes, experts: ExpertPlacement
) -> Iterator[nn.Parameter]:
    """Replace tables, and experts if they are parallel; yields the parameters of this process."""
    for engram in model.engrams():
        engram.table = OwnedTable(engram.table, processes)
        yield from engram.table.parameters()
    for module in model.layers.modules() if experts == "parallel" else ():
        if isinstance(module, MixtureOfExperts):
            module.experts = ParallelExperts(module.experts, processes)
            yield from module.experts.parameters()


def _is_copied(name: str) -> bool:
    """Whether every process holds a parameter whole: it is small, or not of the layers."""
    return name.startswith(("vision.", "drafter.")) or name.endswith(
        (".gate.bias", ".gate.bias_vl")
    )


def _placed(
    name: str,
    parameter: nn.Parameter,
    shape: torch.Size,
    processes: Processes,
    owned: set[nn.Parameter],
) -> Placed:
    first, _ = processes.rows(shape[0])
    if parameter in owned:
        return Placed(
            name=name, parameter=parameter, local=parameter, shape=shape, first=first, is_split=True
        )
    if not isinstance(parameter, DTensor):
        return Placed(name=name, parameter=parameter, local=parameter, shape=shape)
    local = nn.Parameter(parameter.to_local().detach())
    return ShardedParameter(
        name=name, parameter=parameter, local=local, shape=shape, first=first, is_split=True
    )


def _share_counts(processes: Processes, counts: Sequence[int]) -> Int[Tensor, "processes experts"]:
    """Rows that each process has for each expert of this one."""
    return torch.tensor(processes.share_counts(counts)).view(processes.size, -1)
