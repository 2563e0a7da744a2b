"""Reads and writes config.json: the released nested form, and reads the flat inference form."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from openv41.config import (
    AttentionConfig,
    DsparkConfig,
    EngramConfig,
    IndexerConfig,
    MhcConfig,
    ModelConfig,
    MoeConfig,
    VisionConfig,
    YarnConfig,
)
from openv41.errors import ConfigError
from openv41.io.atomic import write_atomic
from openv41.io.hf_keys import (
    DTYPE_FLAT,
    DTYPE_NESTED,
    FIXED,
    IGNORED,
    KEYS,
    QUANTIZATION,
    SECTIONS,
    SWITCHES,
    Fixed,
    Key,
)
from openv41.io.tensor_names import Variant
from openv41.ngram_hash_constants import table_rows

Source = Path | str | Mapping[str, Any]
FILE_NAME = "config.json"
COMPONENTS: dict[str, Callable[..., object]] = {
    "attention.yarn": YarnConfig,
    "attention": AttentionConfig,
    "indexer": IndexerConfig,
    "moe": MoeConfig,
    "mhc": MhcConfig,
    "engram": EngramConfig,
    "vision": VisionConfig,
    "dspark": DsparkConfig,
}
VARIANTS: dict[Any, Variant] = {
    "fp8": "released",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float32": "float32",
    "fp32": "float32",
}
EXPECTED = {
    "int": "an integer",
    "float": "a finite number",
    "bool": "true or false",
    "ints": "a list of integers",
    "float or null": "a finite number or null",
}


def read_config(source: Source) -> ModelConfig:
    """Read a config.json (a file, or the folder that holds it) or its parsed content."""
    where, document = _load(source)
    reader = _Reader(document)
    config = reader.read()
    if config is None or reader.problems:
        raise ConfigError(where, reader.problems)
    return config


def read_variant(source: Source) -> Variant:
    """How the checkpoint beside this configuration stores its weights."""
    where, document = _load(source)
    if document.get("quantization_config") is not None:
        return "released"
    allowed = (*DTYPE_NESTED.allowed, *DTYPE_FLAT.allowed)
    dtype = document.get("dtype")
    if dtype not in allowed:
        raise ConfigError(where, [f"dtype is {_show(dtype)}, must be {_any_of(allowed)}"])
    return VARIANTS[dtype]


def write_config(
    config: ModelConfig, path: Path, *, quantized: bool, dtype: str = "bfloat16"
) -> None:
    """Write the nested form; ``read_config`` gives an equal object back.

    ``dtype`` is what the plain numbers of an unquantised checkpoint are stored in.
    """
    target = path / FILE_NAME if path.is_dir() else path
    text = json.dumps(to_document(config, quantized=quantized, dtype=dtype), indent=2)
    write_atomic(target, (text + "\n").encode("utf-8"))


def to_document(config: ModelConfig, *, quantized: bool, dtype: str = "bfloat16") -> dict[str, Any]:
    """Content of config.json in the released nested form."""
    document: dict[str, Any] = {"architectures": ["DeepseekV41ForCausalLM"]}
    _put(document, DTYPE_NESTED.nested[0], dtype)
    for fixed in (*FIXED, *(QUANTIZATION if quantized else ())):
        if config.vision or not fixed.nested[0].startswith("vision_config."):
            _put(document, fixed.nested[0], fixed.allowed[0])
    off = [part for part in SWITCHES if getattr(config, part) is None]
    for key in KEYS:
        part = key.ours.split(".")[0]
        if part in off:
            continue
        value = _get(config, key.ours)
        if key.ours == "compress_ratios" and config.dspark:
            value = (*value, *[0] * config.dspark.num_stages)
        if key.ours == "moe.gate_temperature" and value == 1.0:
            continue  # absent from released files
        _put(document, key.nested[0], list(value) if isinstance(value, tuple) else value)
    if "engram" in off:
        _put(document, "text_config.engram_layer_ids", [])
    if "dspark" in off:
        _put(document, "text_config.num_nextn_predict_layers", 0)
    return document


@dataclass
class _Reader:
    """Collects values and problems from one document."""

    document: Mapping[str, Any]
    problems: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)  # by our dotted field
    broken: set[str] = field(default_factory=set)  # components that cannot be built

    def __post_init__(self) -> None:
        self.is_flat = "text_config" not in self.document and "dim" in self.document
        self.found = dict(_flatten(self.document, () if self.is_flat else SECTIONS))

    def read(self) -> ModelConfig | None:
        if not self.is_flat and "text_config" not in self.document:
            self._check_fixed(FIXED[0], needed=True)
            self.problems.append(
                "text_config is missing; the released form holds it, and the flat inference form "
                "holds dim in its place"
            )
            return None
        self._refuse_unknown_keys()
        for fixed in FIXED:
            self._check_fixed(fixed, needed=fixed.is_required and not self.is_flat)
        self._check_storage()
        off = {part for part, switch in SWITCHES.items() if self._is_off(part, switch)}
        for key in KEYS:
            if key.ours.split(".")[0] not in off:
                self._take(key)
        self._derive()
        return self._build(off)

    def _names(self, entry: Key | Fixed) -> tuple[str, ...]:
        return entry.flat if self.is_flat else entry.nested

    def _refuse_unknown_keys(self) -> None:
        entries: list[Key | Fixed] = [*KEYS, *FIXED, *QUANTIZATION, DTYPE_NESTED, DTYPE_FLAT]
        known = {name for entry in entries for name in self._names(entry)} | set(IGNORED)
        for section in () if self.is_flat else SECTIONS:
            if section in self.found and self.found[section] is not None:
                kind = _show(self.found[section])
                self.problems.append(f"{section} is {kind}, must be an object")
        for name in self.found:
            if name in known or (name in SECTIONS and not self.is_flat):
                continue
            closest = max(sorted(known), key=lambda other: _likeness(name, other))
            self.problems.append(f"{name} is unknown; the closest known key is {closest}")

    def _check_fixed(self, fixed: Fixed, *, needed: bool) -> None:
        names = self._names(fixed)
        given = [name for name in names if name in self.found]
        if needed and not given:
            self.problems.append(f"{names[0]} is missing, must be {_any_of(fixed.allowed)}")
        for name in given:
            value = self.found[name]
            if not any(type(value) is type(a) and value == a for a in fixed.allowed):
                self.problems.append(f"{name} is {_show(value)}, must be {_any_of(fixed.allowed)}")

    def _check_storage(self) -> None:
        self._check_fixed(DTYPE_FLAT if self.is_flat else DTYPE_NESTED, needed=False)
        is_quantized = not self.is_flat and isinstance(
            self.document.get("quantization_config"), Mapping
        )
        for fixed in QUANTIZATION:
            self._check_fixed(fixed, needed=fixed.is_required and is_quantized)

    def _is_off(self, part: str, switch: str) -> bool:
        """Whether an optional part is switched off: 0, empty, or not mentioned at all."""
        keys = [key for key in KEYS if key.ours.startswith(f"{part}.")]
        for name in self._names(next(key for key in keys if key.ours == switch)):
            if name in self.found:
                value = self.found[name]
                return value == [] or (type(value) is int and value == 0)
        return not any(name in self.found for key in keys for name in self._names(key))

    def _take(self, key: Key) -> None:
        names = self._names(key)
        given = [name for name in names if name in self.found]
        if not given:
            if names and not key.is_optional:
                self.problems.append(f"{names[0]} is missing, must be {EXPECTED[key.kind]}")
                self.broken.add(_component(key.ours))
            return
        values = {name: self.found[name] for name in given}
        for name, value in values.items():
            if not _has_kind(value, key.kind):
                self.problems.append(f"{name} is {_show(value)}, must be {EXPECTED[key.kind]}")
                self.broken.add(_component(key.ours))
                return
        first = values[given[0]]
        for name in given[1:]:
            if values[name] != first:
                self.problems.append(
                    f"{given[0]} is {_show(first)} but {name} is {_show(values[name])}; "
                    "they are the same setting and must agree"
                )
        is_float = key.kind.startswith("float") and first is not None
        self.values[key.ours] = tuple(first) if key.kind == "ints" else first
        if is_float:
            self.values[key.ours] = float(first)

    def _derive(self) -> None:
        """Fill in what a file may leave out, and cut what belongs to the drafter."""
        values = self.values
        if "indexer.candidate_source" not in values and values.get("kv_sources"):
            values["indexer.candidate_source"] = values["kv_sources"][-1]
        factor = values.get("attention.yarn.factor")
        original = values.get("attention.yarn.original_max_position")
        if self.is_flat and factor and original:
            values["max_position"] = int(factor * original)
        layers, ratios = values.get("num_layers"), values.get("compress_ratios")
        if layers is None or ratios is None:
            return
        stages = values.get("dspark.num_stages", 0)
        name = "compress_ratios" if self.is_flat else "text_config.compress_ratios"
        if len(ratios) != layers + stages:
            self.problems.append(
                f"{name} has {len(ratios)} entries, must have {layers + stages}: one per layer "
                f"({layers}) and one per drafter stage ({stages})"
            )
            self.broken.add("")
        elif any(ratios[layers:]):
            self.problems.append(
                f"{name} ends with {_show(list(ratios[layers:]))}; the last {stages} belong to "
                "the drafter and must be 0"
            )
        values["compress_ratios"] = ratios[:layers]

    def _build(self, off: set[str]) -> ModelConfig | None:
        for component, build in COMPONENTS.items():
            if component in off or component in self.broken:
                continue
            self._try(component, build)
        if "engram" in self.values:
            self._check_table_rows(self.values["engram"])
        if self.broken:
            return None
        self._try("", ModelConfig)
        return self.values.get("")

    def _try(self, component: str, build: Callable[..., object]) -> None:
        """Build a component and keep it under its name; keep its problems if it cannot be."""
        fields = {n: v for n, v in self.values.items() if n and _component(n) == component}
        try:
            self.values[component] = build(**{n.rpartition(".")[2]: v for n, v in fields.items()})
        except ConfigError as error:
            self.problems += [f"{error.where}: {problem}" for problem in error.problems]
            self.broken |= {component, component.rpartition(".")[0]}

    def _check_table_rows(self, engram: EngramConfig) -> None:
        rows = table_rows(engram)
        if rows != engram.num_embeddings:
            self.problems.append(
                f"engram: num_embeddings is {list(engram.num_embeddings)}, must be {list(rows)}: "
                f"the sums of the first primes from {engram.table_size}"
            )


def _load(source: Source) -> tuple[str, Mapping[str, Any]]:
    """Where the configuration comes from, in words, and its parsed content."""
    if isinstance(source, Mapping):
        return "config", source
    path = Path(source)
    path = path / FILE_NAME if path.is_dir() else path
    where, repeated = str(path), list[str]()

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        repeated.extend(sorted({name for name in names if names.count(name) > 1}))
        return dict(pairs)

    try:
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except FileNotFoundError:
        raise ConfigError(
            where, ["no such file; give a checkpoint folder or its config.json"]
        ) from None
    except OSError as error:
        raise ConfigError(where, [f"cannot be read: {error.strerror}"]) from None
    except json.JSONDecodeError as error:
        at = f"line {error.lineno} column {error.colno}"
        raise ConfigError(where, [f"no valid JSON at {at}: {error.msg}"]) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(where, [f"no valid JSON: {error}"]) from None
    if repeated:
        raise ConfigError(where, [f"{name} is given more than once" for name in repeated])
    if not isinstance(document, dict):
        raise ConfigError(where, [f"holds {_show(document)}, must hold one JSON object"])
    return where, document


def _flatten(
    document: Mapping[str, Any], sections: tuple[str, ...], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        path = f"{prefix}{name}"
        if path in sections and isinstance(value, Mapping):
            yield from _flatten(value, sections, f"{path}.")
        else:
            yield path, value


def _component(ours: str) -> str:
    return ours.rpartition(".")[0]


def _has_kind(value: object, kind: str) -> bool:
    """Strict: no bool for a number, no "4" for 4, no 4.0 for 4."""
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "ints":
        return isinstance(value, list) and all(_has_kind(item, "int") for item in value)
    if value is None:
        return kind == "float or null"
    if type(value) is int:
        return abs(value) < 2**63
    return kind != "int" and type(value) is float and math.isfinite(value)


def _likeness(name: str, other: str) -> tuple[float, float]:
    """Same last word first (a key in the wrong section), then the whole path."""
    ends = name.rpartition(".")[2], other.rpartition(".")[2]
    return SequenceMatcher(None, *ends).ratio(), SequenceMatcher(None, name, other).ratio()


def _show(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _any_of(allowed: tuple[object, ...]) -> str:
    return " or ".join(_show(value) for value in allowed)


def _get(config: ModelConfig, ours: str) -> Any:  # noqa: ANN401 -- any field of any component
    value: Any = config
    for name in ours.split("."):
        value = getattr(value, name)
    return value


def _put(document: dict[str, Any], path: str, value: object) -> None:
    *sections, name = path.split(".")
    for section in sections:
        document = document.setdefault(section, {})
    document[name] = value
