"""The engine on a CUDA device: pages, rings and prefix hits there, as the plain model answers."""

import pytest
import torch

from openv41.engine.request import FinishReason
from openv41.model.prefill import PrefillMode
from tests.engine.mini_engine import LENGTHS, arm, engine_of, greedy, plain_logits
from tests.layers.mini import random_ids

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", list(PrefillMode))
@pytest.mark.parametrize("numerics", ["f32", "f32qat"])
def test_it_answers_as_the_plain_model_does(mode, numerics):
    model = arm(torch.float64, bitwise=False, numerics=numerics)
    model.to("cuda")
    engine = engine_of(model, tokens_per_step=23, mode=mode, max_snapshots=4)
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    cold = engine.generate([greedy(p, 4) for p in prompts])
    warm = engine.generate([greedy(p, 4) for p in prompts])
    assert all(a.finish_reason is FinishReason.LENGTH for a in [*cold, *warm]), [*cold, *warm]
    assert engine.store.pages[next(iter(engine.store.pages))].is_cuda
    assert [answer.cached_tokens for answer in warm] == [len(p) - 1 for p in prompts]
    if mode is not PrefillMode.BOUNDED:
        for number, (prompt, answer) in enumerate(zip(prompts * 2, [*cold, *warm], strict=True)):
            want = plain_logits(model, prompt, answer.tokens).cpu()
            got = torch.stack(engine.drawn_from[number]).cpu()
            assert (got - want).abs().max() <= 1e-9, f"{number}, prompt of {len(prompt)}"
    engine.prefixes.clear()
    assert engine.store.allocator.free == engine.store.cache.num_pages
