"""Engines over the mini model, and what the plain model says about the same requests."""

from dataclasses import replace

import torch

from openv41.config import NUMERICS
from openv41.engine.engine import Engine, EngineConfig
from openv41.engine.paged_store import CacheConfig
from openv41.engine.request import Request
from openv41.engine.sampler import SamplingConfig
from openv41.engine.scheduler import ScheduleConfig
from openv41.image_grid import ImageGrid
from openv41.io.image_processor import ProcessedImage
from openv41.io.tokenizer import TextTokenizer
from openv41.layers.batch import Batch
from openv41.model.cache import DenseStore
from openv41.model.image_tower import ImageTower
from openv41.model.prefill import PrefillMode
from tests.layers.mini import IMAGE_TOKEN, VISION, VOCAB, mini_model

GREEDY = SamplingConfig(temperature=0.0)
WINDOW = 4
LENGTHS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW + 1, 29)


class Letters(TextTokenizer):
    """One character for each token of the mini model."""

    def __init__(self):
        self.vocab_size = VOCAB

    def token_bytes(self, token):
        return chr(0x30 + token).encode()


class RecordingEngine(Engine):
    """Keeps the logits that each request drew from."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.drawn_from = {}
        self.batches = []

    def _draw(self, job, logits, tokens):
        before = job.num_output
        super()._draw(job, logits, tokens)
        drawn = max(1, job.num_output - before)
        self.drawn_from.setdefault(job.number, []).extend(logits[:drawn].clone())

    def _forward(self, step):
        self.batches.append([(job.number, count) for job, count in step])
        return super()._forward(step)


def arm(dtype, *, bitwise, numerics="f32", config=None):
    """A mini model that never draws EOS by a greedy choice."""
    model = mini_model(3, dtype, replace(NUMERICS[numerics], deterministic=bitwise), config)
    with torch.no_grad():
        for layer in model.layers:
            layer.moe.gate.bias *= 0.1
        model.head.weight[model.config.eos_token_id] = 0
    return model


def engine_of(
    model,
    *,
    tokens_per_step=512,
    max_queue=1024,
    mode=PrefillMode.EXACT,
    cache=None,
    tokenizer=None,
    drafter=None,
    speculator=None,
    **options,
):
    """An engine with few and small pages, poisoned where nobody owns them."""
    sizes = {"num_pages": 200, "page_size": 4, "poison": True} | (cache or {})
    config = EngineConfig(
        cache=CacheConfig(**sizes),
        schedule=ScheduleConfig(tokens_per_step=tokens_per_step, max_queue=max_queue),
        prefill=mode,
        **options,
    )
    return RecordingEngine(
        model,
        tokenizer or Letters(),
        config,
        fingerprint="mini",
        drafter=drafter,
        speculator=speculator,
    )


def greedy(prompt, max_tokens=5, **options):
    return Request(
        prompt=tuple(prompt), max_tokens=max_tokens, sampling=GREEDY, ignore_eos=True, **options
    )


@torch.no_grad()
def plain_logits(model, prompt, tokens, images=()):
    """Logits before each of the drawn tokens, by one forward over everything."""
    ids = [*prompt, *tokens[:-1]]
    embeds = [model.vision(image.patches(), [image.grid]) for image in images]
    batch = Batch.from_documents(
        [ids], model.norm.weight.device, image_embeds=torch.cat(embeds) if embeds else None
    )
    hidden = model(batch).hidden
    return model.logits(hidden[len(prompt) - 1 :])


@torch.no_grad()
def stored_rows(model, ids):
    """Main KV and index keys of the plain model after these tokens, by slot."""
    store = DenseStore(model.config.compress_ratios)
    model(Batch(torch.tensor(ids), (0,), (0,), (len(ids),)), store)
    return store


def see(model, seed=1):
    """Give a model a small vision encoder."""
    model.config = replace(model.config, vision=VISION)
    weight = model.norm.weight
    model.vision = ImageTower(VISION, model.config.hidden_size, model.numerics, dtype=weight.dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.vision.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return model


def picture(seed, rows=3, cols=6):
    """A random image of this many patches."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (rows * cols, 3, 2, 2), generator=generator, dtype=torch.uint8)
    return ProcessedImage(pixels, ImageGrid(rows, cols, 3))


def span(image):
    """The tokens of an image."""
    return [IMAGE_TOKEN] * image.grid.span_length
