"""Loads and saves models in the released layout or as plain numbers. Report §2.1.

``load_model`` gives the model. ``load_checkpoint`` keeps the tokenizer's files beside it, so that
saving gives back the whole checkpoint, byte for byte, when the source is long gone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from openv41.config import NUMERICS, ModelConfig, NumericsConfig
from openv41.errors import CheckpointError
from openv41.io.checkpoint_writer import (
    PLAIN_DTYPES,
    Progress,
    read_companions,
    write_checkpoint,
)
from openv41.io.engram_map import token_map_for
from openv41.io.engram_store import EngramPlacement, StoredTable, move_tables_out
from openv41.io.hf_config import read_config, read_variant
from openv41.io.shard_index import ShardSet
from openv41.io.tensor_names import Variant, tensor_table
from openv41.io.tokenizer import TOKENIZER_FILE
from openv41.io.weight_rows import (
    FileSource,
    Rows,
    Weight,
    as_plain,
    as_stored,
    by_name,
    slice_rows,
)
from openv41.layers.quantized_linear import QuantizedWeight
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder

DRAFTER = "drafter."  # what the names of its parameters begin with
LoadDtype = torch.dtype | Literal["stored"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model and the files of its checkpoint that travel with it."""

    model: CausalEncoderDecoder
    variant: Variant
    companions: Mapping[str, bytes] = field(default_factory=dict)  # tokenizer files by name


def load_model(
    folder: Path,
    *,
    numerics: NumericsConfig = NUMERICS["f32"],
    dtype: LoadDtype = "stored",
    device: torch.device | str = "cpu",
    engram: EngramPlacement = "resident",
    drafter: bool = True,
) -> CausalEncoderDecoder:
    """Load the model; without ``drafter`` its tensors are checked but not read.

    "stored" keeps quantised weights as the file's codes and everything else in the file's dtype; a
    torch dtype makes every weight a float parameter (float32 holds every stored value exactly).
    ``engram`` says where the Engram tables live: in the model, in host memory, or in their file,
    from which only the rows that a step needs are read. All give the same bits.
    """
    checkpoint = load_checkpoint(
        folder, numerics=numerics, dtype=dtype, device=device, engram=engram, drafter=drafter
    )
    return checkpoint.model


def load_checkpoint(
    folder: Path,
    *,
    numerics: NumericsConfig = NUMERICS["f32"],
    dtype: LoadDtype = "stored",
    device: torch.device | str = "cpu",
    engram: EngramPlacement = "resident",
    drafter: bool = True,
) -> Checkpoint:
    """Load the model with everything that ``save_checkpoint`` needs to write it back.

    Raises CheckpointError before the first weight is read where a tensor is missing, unknown,
    misshaped or of the wrong dtype. Without ``drafter`` the model and what is saved have none.
    """
    source, config, variant = open_source(folder)
    if not drafter:
        config = replace(config, dspark=None)
    plain = PLAIN_DTYPES[variant] if dtype == "stored" else dtype
    model = CausalEncoderDecoder(config, numerics, device="meta", dtype=plain)
    has_codes = dtype == "stored" and variant == "released"
    moved: set[str] = set()
    if engram != "resident":
        kept = None if has_codes else plain
        moved = move_tables_out(model, source, engram, kept, torch.device(device))
    filler = _Filler(model, device, keep_codes=dtype == "stored")
    for weight in source.weights.values():
        is_left_out = not drafter and weight.spec.ours.startswith(DRAFTER)
        if not is_left_out and weight.spec.ours not in moved:
            filler.fill(source, weight)
    filler.finish()
    if config.engram and (folder / TOKENIZER_FILE).exists():
        model.set_token_map(token_map_for(folder, config))
    companions = read_companions(folder)
    return Checkpoint(model=model, variant=variant, companions=companions)


def save_checkpoint(checkpoint: Checkpoint, folder: Path, *, variant: Variant = "released") -> None:
    """Write a loaded checkpoint with its tokenizer files."""
    save_model(checkpoint.model, folder, variant=variant, companions=checkpoint.companions)


def save_model(
    model: CausalEncoderDecoder,
    folder: Path,
    *,
    variant: Variant = "released",
    companions: Mapping[str, bytes] | None = None,
) -> None:
    """Write a model; stored codes pass through, float weights are quantised for "released".

    ``companions`` are the tokenizer's files, see ``read_companions``. The folder appears complete
    or not at all; an older checkpoint there is replaced.
    """
    source = _ModelSource(model)
    write_checkpoint(source, model.config, folder, variant=variant, companions=companions or {})


def convert(
    source_folder: Path, folder: Path, *, variant: Variant, progress: Progress | None = None
) -> None:
    """Rewrite a checkpoint in another variant, a few rows at a time."""
    check_apart(source_folder, folder)
    source, config, _ = open_source(source_folder)
    companions = read_companions(source_folder)
    write_checkpoint(
        source, config, folder, variant=variant, companions=companions, progress=progress
    )


def check_apart(source_folder: Path, folder: Path) -> None:
    """Raise CheckpointError unless writing one folder leaves the other as it is."""
    read, written = source_folder.resolve(), folder.resolve()
    if read == written:
        raise CheckpointError(f"{folder}: source and destination are the same; name another folder")
    if read in written.parents or written in read.parents:
        how = "inside" if read in written.parents else "around"
        raise CheckpointError(
            f"{folder}: the destination is {how} the source ({source_folder}); name a folder "
            "beside it"
        )


def open_source(folder: Path) -> tuple[FileSource, ModelConfig, Variant]:
    """Open a checkpoint folder and check every header against the model's table."""
    files = ShardSet(folder)
    config, variant = read_config(folder), read_variant(folder)
    table = tensor_table(config, variant=variant)
    files.check(table)
    return FileSource(files, table), config, variant


class _Filler:
    """Turns a model on the meta device into a real one, tensor by tensor."""

    def __init__(
        self, model: CausalEncoderDecoder, device: torch.device | str, *, keep_codes: bool
    ) -> None:
        self.model = model
        self.device = device
        self.keep_codes = keep_codes
        self.parameters = dict(model.named_parameters())
        self.filled: dict[str, Tensor] = {}  # by parameter name, or that of its codes and scales

    def fill(self, source: FileSource, weight: Weight) -> None:
        """Copy a weight in; an expert goes into its row of the stack."""
        spec, scale = weight.spec, weight.scale
        meta = self.parameters[spec.ours]
        if scale is None or not self.keep_codes:
            target = self._target(spec.ours, spec.expert, meta.shape, meta.dtype)
            for start, stop in weight.chunks():
                rows = source.rows(weight, start, stop)
                target[start:stop].copy_(as_plain(rows, weight, target.dtype))
            return
        stack = () if spec.expert is None else meta.shape[:1]
        for start, stop in weight.chunks():
            codes, scales = as_stored(source.rows(weight, start, stop), weight)
            shape = (*stack, *spec.shape)
            self._target(spec.stored_as, spec.expert, shape, codes.dtype)[start:stop].copy_(codes)
            shape = (*stack, *scale.shape)
            target = self._target(scale.stored_as, spec.expert, shape, scales.dtype)
            first, last = weight.scale_rows(start, stop)
            target[first:last].copy_(scales)

    def finish(self) -> None:
        """Put the tensors into the modules; every parameter must have got its own."""
        for name, parameter in self.parameters.items():
            owner, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(owner)
            if name in self.filled:
                value = nn.Parameter(self.filled[name], requires_grad=parameter.requires_grad)
                setattr(module, leaf, value)
            else:
                assert isinstance(module, QuantizedWeight), f"{name} is in no checkpoint"
                module.store(self.filled[f"{owner}.codes"], self.filled[f"{owner}.scales"])
        self.model.to(self.device)  # constants that are not in the checkpoint

    def _target(
        self, name: str, expert: int | None, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """The tensor to fill, made at its first use; an expert's is a row of its stack."""
        if name not in self.filled:
            self.filled[name] = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        tensor = self.filled[name]
        return tensor if expert is None else tensor[expert]


class _ModelSource:
    """Weights of a model in memory."""

    def __init__(self, model: CausalEncoderDecoder) -> None:
        self.state = model.state_dict()
        self.tables = {
            f"{name}.weight": module
            for name, module in model.named_modules()
            if isinstance(module, StoredTable)
        }
        self.stored = by_name(tensor_table(model.config))

    def rows(self, weight: Weight, start: int, stop: int) -> Rows:
        """Rows of a parameter, or of its stored form."""
        spec = weight.spec
        if spec.ours in self.tables:
            return self.tables[spec.ours].stored_rows(start, stop)
        values, scales = self.state.get(spec.ours), None
        if values is None:
            stored = self.stored[weight.name]
            assert stored.scale is not None, f"{spec.ours} is not in the model"
            values = self.state[stored.spec.stored_as]
            scales = self.state[stored.scale.stored_as]
        if spec.expert is not None:
            values = values[spec.expert]
            scales = None if scales is None else scales[spec.expert]
        return slice_rows(Rows(values, scales), weight, start, stop)
