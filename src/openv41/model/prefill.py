"""CED prefill: which rows of a prompt each layer computes. Report §2.2.

The encoder and the decoder's kv source run on all prompt rows; the other decoder layers only on the
rows that later rows can still see. With W the window and L the layers, the last row sees W - 1 rows
more in each layer below, which is what ``exact`` computes; ``bounded`` cuts at the last W rows
(Decoder SWA Bounded Replay). After a prefix-cache hit the same arithmetic says how far the replay
reaches back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from openv41.config import ModelConfig
from openv41.errors import InputError
from openv41.layers.geometry import ReplayBounds
from openv41.plan import plan_layers


class PrefillMode(StrEnum):
    """How much of the decoder runs on a prompt."""

    FULL = "full"  # every layer on every row
    EXACT = "exact"  # all that the last row and later steps depend on
    BOUNDED = "bounded"  # the last window of rows, with windows cut at its start


class ReplayVariant(StrEnum):
    """What the first decoder layer sees behind the replayed rows."""

    FIRST_LAYER_FULL_WINDOW = "first_layer_full_window"
    ALL_BOUNDED = "all_bounded"


@dataclass(frozen=True, kw_only=True)
class LayerRows:
    """Rows that one layer computes: each request's positions from ``firsts`` on.

    Rows before them end here. They leave their main KV and index keys, and their window KV unless
    ``windows_end`` says that no row may see it.
    """

    firsts: Mapping[int, int]  # by request; a request that is not there computes every row
    windows_end: bool = False

    def aligned(self, requests: Sequence[int]) -> tuple[int, ...]:
        """First position of each request."""
        return tuple(self.firsts.get(request, 0) for request in requests)


@dataclass(frozen=True, kw_only=True)
class PromptRows:
    """Rows of one prompt that are computed: those fed to the model, and those of each layer."""

    start: int  # first position that the model is fed
    firsts: tuple[int, ...]  # first position that each layer computes
    cut: int  # first layer that skips prompt rows; the number of layers where none does
    cut_ends_window: bool = False  # rows that end at the cut leave no window KV either

    def is_whole(self) -> bool:
        """Whether every layer computes every row that the model is fed."""
        return not self.firsts or max(self.firsts) <= self.start


def layer_rows(config: ModelConfig, prompts: Mapping[int, PromptRows]) -> list[LayerRows] | None:
    """Rows of every layer for a batch, by request; None where no row is skipped."""
    if all(prompt.is_whole() for prompt in prompts.values()):
        return None
    return [
        LayerRows(
            firsts={request: prompt.firsts[layer] for request, prompt in prompts.items()},
            windows_end=any(p.cut_ends_window and p.cut == layer for p in prompts.values()),
        )
        for layer in range(config.num_layers)
    ]


def find_cut(config: ModelConfig, cut: int | None = None) -> tuple[int | None, str]:
    """First layer that may skip prompt rows, or None with the reason why none may.

    ``cut`` names a layer other than the last kv source.
    """
    if not config.kv_sources:
        return None, "no layer has main KV"
    source = max(config.kv_sources)
    cut = source if cut is None else cut
    if not 0 <= cut < config.num_layers:
        raise InputError(f"prefill cut is layer {cut}; the model has {config.num_layers} layers")
    if above := [s for s in config.kv_sources if s > cut]:
        return None, f"layer {above[0]} above the cut at {cut} is a kv source"
    plans = plan_layers(config)[cut:]
    if engrams := [plan.layer for plan in plans if plan.has_engram]:
        return None, f"layer {engrams[0]}, not below the cut at {cut}, has an Engram"
    if cut != source and plans[0].ratio and not plans[0].is_index_source:
        return None, f"layer {cut} reads a selection that is made below the cut"
    return cut, ""


def prompt_rows(
    config: ModelConfig,
    mode: PrefillMode,
    length: int,
    *,
    cut: int | None,
    known: int = 0,
    restored: int | None = None,
    variant: ReplayVariant = ReplayVariant.FIRST_LAYER_FULL_WINDOW,
    tail: int = 1,
) -> PromptRows:
    """Say which rows of a prompt are computed; ``cut`` None computes all as ``full`` does.

    ``tail`` rows at the end are computed by every layer: a drafter reads features of a window.

    The first ``known`` tokens have main KV and index keys but no window KV, so enough of them are
    replayed; ``restored`` is a position whose window KV is there.
    """
    assert known < length, f"{known} of {length} tokens known: the last row is always computed"
    window, layers = config.attention.window_size, config.num_layers
    if mode is PrefillMode.FULL or cut is None:
        cut = layers
    if mode is PrefillMode.BOUNDED and cut < layers:
        start = _group_start(config, known - window) if known else 0
        tail = max(start, length - window)
        return PromptRows(
            start=start,
            firsts=(start,) * cut + (tail,) * (layers - cut),
            cut=cut,
            cut_ends_window=variant is ReplayVariant.ALL_BOUNDED,
        )
    needed = first_needed(config, length, cut, known, tail)
    if restored is not None:
        start, firsts = restored, tuple(max(restored, n) for n in needed)
    elif known:
        start = _group_start(config, needed[0] - (window - 1))
        firsts = tuple(max(start, n) for n in needed)
    else:
        start, firsts = 0, tuple(max(0, n) for n in needed)
    return PromptRows(start=start, firsts=firsts, cut=cut)


def replay_bounds(
    config: ModelConfig, prompts: Sequence[int], *, cut: int, variant: ReplayVariant
) -> ReplayBounds:
    """What a ``bounded`` prefill of prompts of these lengths leaves, for one forward over texts.

    Of a prompt of P tokens the last is at position P - 1, and rows P - W to P - 1 are replayed;
    later rows see them as they were replayed.
    """
    rows = [
        prompt_rows(config, PrefillMode.BOUNDED, length, cut=cut, variant=variant)
        for length in prompts
    ]
    return ReplayBounds(
        floors=tuple(prompt.firsts[cut] for prompt in rows),
        first_layer=cut,
        first_bounded=cut if variant is ReplayVariant.ALL_BOUNDED else cut + 1,
    )


def first_needed(
    config: ModelConfig, length: int, cut: int, known: int, tail: int = 1
) -> list[int]:
    """First row of each layer whose output a later row depends on; may be below 0.

    A row depends on W - 1 rows more of the layer below. Of the layers from ``cut`` on only the last
    ``tail`` rows are wanted, of those below all that are not ``known``.
    """
    layers, reach = config.num_layers, config.attention.window_size - 1
    wanted = length - tail
    needed = [wanted if cut < layers else min(known, wanted)]
    for layer in reversed(range(layers - 1)):
        below = needed[-1] - reach
        needed.append(min(below, known) if layer < cut else below)
    return needed[::-1]


def _group_start(config: ModelConfig, position: int) -> int:
    """Start of the compression groups that hold a position, 0 for one below 0."""
    position = max(0, position)
    return position - position % max(1, *config.compress_ratios)
