"""Images in the engine: whatever the chunks, neighbours and caches, the plain model's answer."""

import re

import pytest
import torch

from openv41.engine.images import ImageCache, find_spans
from openv41.errors import ConfigError
from openv41.model.prefill import PrefillMode
from tests.close import assert_close
from tests.engine.mini_engine import arm, engine_of, greedy, picture, plain_logits, see, span
from tests.layers.mini import IMAGE_TOKEN, random_ids

MODES = (PrefillMode.FULL, PrefillMode.EXACT)
PICTURES = [picture(1), picture(2, 7, 2), picture(3, 4, 4)]


def prompts():
    """Images at odd places: first, last, side by side, none."""
    a, b, c = PICTURES
    text = random_ids(9, seed=4)
    return [
        ([*text, *span(a), *text[:2]], (a,)),
        ([*span(b), *text], (b,)),
        ([*text[:5], *span(c), *span(a)], (c, a)),
        (random_ids(13, seed=5), ()),
        ([*span(a)], (a,)),
    ]


SPAN = range(9, 9 + PICTURES[0].grid.span_length + 1)  # where the first prompt's span may be cut


@pytest.fixture(scope="module")
def model():
    return see(arm(torch.float64, bitwise=False))


def ask(engine, requests):
    first = engine._next
    answers = engine.generate(requests)
    drawn = [torch.stack(engine.drawn_from[first + i]) for i in range(len(requests))]
    return answers, drawn


def assert_plain(model, engine, asked, count=4):
    requests = [greedy(ids, count, images=images) for ids, images in asked]
    answers, drawn = ask(engine, requests)
    for (ids, images), answer, got in zip(asked, answers, drawn, strict=True):
        want = plain_logits(model, ids, answer.tokens, images)
        assert answer.tokens == tuple(want.argmax(1).tolist())
        assert_close(f"prompt of {len(ids)}", got, want, rtol=1e-9, atol=1e-9)
    return answers


@pytest.mark.parametrize(
    ("mode", "budget"),
    [
        (PrefillMode.EXACT, 5),
        (PrefillMode.FULL, 7),
        *(pytest.param(m, b, marks=pytest.mark.prove) for m in MODES for b in (1, 6, 11, 512)),
    ],
)
def test_every_chunking_equals_the_plain_model(model, mode, budget):
    """Budgets cut spans at every offset; text and images stand side by side in a step."""
    engine = engine_of(model, tokens_per_step=budget, mode=mode)
    assert_plain(model, engine, prompts())
    engine.prefixes.clear()
    assert engine.store.allocator.free == engine.store.cache.num_pages


@pytest.mark.parametrize("first", [pytest.param(SPAN, marks=pytest.mark.prove), (10, 13)], ids=len)
def test_a_chunk_boundary_at_every_offset_of_a_span(model, first):
    ids, images = prompts()[0]
    for budget in first:
        engine = engine_of(model, tokens_per_step=budget, prefix_cache=False)
        assert_plain(model, engine, [(ids, images)], count=1)


def test_answers_do_not_depend_on_neighbours_bit_for_bit():
    bitwise = see(arm(torch.float32, bitwise=True))
    alone = []
    for ids, images in prompts():
        _, [logits] = ask(engine_of(bitwise), [greedy(ids, 4, images=images)])
        alone.append(logits)
    order = [3, 0, 4, 2, 1]
    requests = [greedy(prompts()[i][0], 4, images=prompts()[i][1]) for i in order]
    _, together = ask(engine_of(bitwise, tokens_per_step=9), requests)
    for place, i in enumerate(order):
        assert torch.equal(together[place], alone[i]), f"prompt {i}"


@pytest.mark.shapes
def test_equal_ids_with_other_images_share_no_prefix(model):
    """Warm equals cold for each; only what stands before the image is taken over."""
    text, first, second = random_ids(9, seed=4), picture(1), picture(8)
    engine = engine_of(model)
    ids = [*text, *span(first), *text]
    assert_plain(model, engine, [(ids, (first,))])
    [other] = assert_plain(model, engine, [(ids, (second,))])
    assert other.cached_tokens == len(text)
    [again] = assert_plain(model, engine, [(ids, (first,))])
    assert again.cached_tokens == len(ids) - 1


def test_hits_around_an_image_equal_a_cold_run(model):
    """Up to the image, right before it, and behind it."""
    ids, images = prompts()[0]
    for shared in (8, 9, 15):
        engine = engine_of(model)
        ask(engine, [greedy(ids, 1, images=images)])
        mixed = ids[:shared] + random_ids(7, seed=20 + shared)
        seen = images if IMAGE_TOKEN in mixed else ()
        [answer] = assert_plain(model, engine, [(mixed, seen)], count=2)
        assert answer.cached_tokens == shared


def test_a_restart_from_disk_tells_images_apart(model, tmp_path):
    ids, [first] = prompts()[0]
    engine = engine_of(model, disk_folder=tmp_path, disk_bytes=1 << 20)
    ask(engine, [greedy(ids, 1, images=(first,))])
    engine.close()
    engine = engine_of(model, disk_folder=tmp_path, disk_bytes=1 << 20)
    [other] = assert_plain(model, engine, [(ids, (picture(8),))], count=1)
    assert other.cached_tokens < 9 + 1
    [same] = assert_plain(model, engine, [(ids, (first,))], count=1)
    assert same.cached_tokens >= len(ids) - 1 - engine.store.cache.page_size
    engine.close()


def test_a_span_is_computed_once(model):
    ids, images = prompts()[0]
    engine = engine_of(model, tokens_per_step=3, prefix_cache=False)
    assert_plain(model, engine, [(ids, images)])
    assert (engine.stats().images_encoded, engine.stats().image_hits) == (1, 0)
    assert_plain(model, engine, [(ids, images)] * 2)
    assert (engine.stats().images_encoded, engine.stats().image_hits) == (1, 2)
    assert engine.stats().image_bytes == images[0].grid.span_length * 16 * 8


@pytest.mark.shapes
def test_the_cache_keeps_to_its_bound(model):
    room = PICTURES[0].grid.span_length * 16 * 8
    cache = ImageCache(model.vision, room)
    for image in (PICTURES[0], picture(8), PICTURES[1], PICTURES[0]):  # the third is too large
        cache.embeds(image)
        assert cache.num_bytes == room
    assert (cache.encoded, cache.hits) == (4, 0)
    nothing = ImageCache(model.vision, 0)
    assert torch.equal(nothing.embeds(PICTURES[0]), cache.embeds(PICTURES[0]))
    assert nothing.num_bytes == 0


def test_a_preempted_request_sees_its_images_again(model):
    engine = engine_of(model, tokens_per_step=16, cache={"num_pages": 15, "page_size": 4})
    assert_plain(model, engine, [prompts()[0], prompts()[1], prompts()[2]], count=12)
    assert engine.stats().preemptions > 0


def test_an_image_token_is_never_drawn(model):
    head = model.head.weight.data
    kept = head[IMAGE_TOKEN].clone()
    head[IMAGE_TOKEN] = 100 * head.abs().max()
    try:
        [answer], _ = ask(engine_of(model), [greedy(random_ids(9), 8)])
    finally:
        head[IMAGE_TOKEN] = kept
    assert IMAGE_TOKEN not in answer.tokens


def test_image_positions_have_no_prompt_logprob(model):
    ids, images = prompts()[0]
    [answer], _ = ask(engine_of(model), [greedy(ids, 1, images=images, prompt_logprobs=1)])
    missing = [i for i, own in enumerate(answer.prompt_logprobs) if own is None]
    assert missing == [0, *(i for i, token in enumerate(ids) if token == IMAGE_TOKEN)]


@pytest.mark.parametrize(
    ("ids", "count", "message"),
    [
        ([1, IMAGE_TOKEN, 2], 0, "the prompt holds 1 image tokens (63), its 0 images fill 0"),
        ([1, 2], 1, "the prompt holds 0 image tokens (63), its 1 images fill 5"),
        ([*span(PICTURES[0])[:2], 5, *span(PICTURES[0])[2:]], 1, "do not stand side by side"),
    ],
)
def test_tokens_and_images_must_belong_together(model, ids, count, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_spans(ids, PICTURES[:count], model.config)


def test_a_text_model_takes_no_image():
    blind = arm(torch.float64, bitwise=False)
    engine = engine_of(blind)
    assert engine.images._tower is None
    with pytest.raises(ConfigError, match="1 images, but the model sees none"):
        engine.submit(greedy([1, 2], images=(PICTURES[0],)), print)
