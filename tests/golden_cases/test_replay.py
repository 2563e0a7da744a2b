"""Decoder SWA Bounded Replay against the golden sets, by the model alone and by the engine."""

import pytest
import torch

from openv41.io.tensor_files import read_tensors
from openv41.io.trace import run_case
from openv41.model.prefill import PrefillMode, ReplayVariant
from tests.engine.mini_engine import Letters, engine_of, greedy


class Vocabulary(Letters):
    """As many tokens as the golden models have."""

    def __init__(self, size):
        self.vocab_size = size


def want_of(golden):
    return read_tensors(golden.folder / "replay_f32.safetensors")


def test_traced_replay_equals_golden(golden):
    got, want = run_case(golden.model("f32"), golden.inputs, "replay", "f32"), want_of(golden)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].shape == value.shape, name
        assert (got[name] - value).abs().max() <= 2e-4, name


def test_the_variants_differ(golden):
    got = run_case(golden.model("f32"), golden.inputs, "replay", "f32")
    names = [f"{variant}.prefill_rows_logits" for variant in ReplayVariant]
    assert (got[names[0]] - got[names[1]]).abs().max() > 1e-3


@pytest.mark.parametrize("variant", list(ReplayVariant))
@pytest.mark.parametrize("chunk", [7, 512])
def test_the_engine_replays_as_golden(golden, variant, chunk):
    """The last prompt row's logits, whatever the chunks of the prefill."""
    model, inputs = golden.model("f32"), golden.inputs
    engine = engine_of(
        model,
        mode=PrefillMode.BOUNDED,
        tokens_per_step=chunk,
        cache={"page_size": 16},
        replay_variant=variant,
        tokenizer=Vocabulary(model.config.vocab_size),
    )
    engine.generate([greedy(inputs.text_ids[: inputs.prefill_len].tolist(), 1)])
    want = want_of(golden)[f"{variant}.prefill_rows_logits"][-1]
    assert (engine.drawn_from[0][0] - want).abs().max() <= 2e-4


@pytest.mark.parametrize("mode", [PrefillMode.FULL, PrefillMode.EXACT])
def test_the_engine_decodes_as_golden(golden, mode):
    model, inputs = golden.model("f32"), golden.inputs
    want = golden.want("decode", "f32")
    engine = engine_of(
        model,
        mode=mode,
        tokens_per_step=29,
        cache={"page_size": 16},
        tokenizer=Vocabulary(model.config.vocab_size),
    )
    count = len(want["greedy_tokens"])
    prompt = inputs.text_ids[: inputs.prefill_len].tolist()
    [answer] = engine.generate([greedy(prompt, count)])
    assert answer.tokens == tuple(want["greedy_tokens"].tolist())
    got = torch.stack(engine.drawn_from[0])
    assert (got - want["greedy_logits"]).abs().max() <= 2e-4
