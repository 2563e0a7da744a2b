"""Random checkpoints in the released format that do not let a wrong port pass by luck. Report §2.1.

Sizes are chosen so that every mechanism is at work: windows that are crossed, selections that
reject, pools smaller than the context, partial blocks, ties, clamps. The outputs beside a fixture
come from this package's own model in float64; they are no independent implementation's.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from tokenizers import Tokenizer
from torch import Tensor

from openv41.config import (
    AttentionConfig,
    DsparkConfig,
    EngramConfig,
    IndexerConfig,
    ModelConfig,
    MoeConfig,
    VisionConfig,
    YarnConfig,
)
from openv41.errors import InputError
from openv41.image_grid import TEXT, grid_of
from openv41.io.atomic import atomic_folder
from openv41.io.checkpoint import load_model
from openv41.io.checkpoint_writer import write_checkpoint
from openv41.io.fixture_rules import Rule, check_draft_rules, check_rules, readme
from openv41.io.image_processor import ProcessedImage
from openv41.io.tensor_files import write_tensors
from openv41.io.token_classes import compress_vocabulary
from openv41.io.tokenizer import TOKENIZER_FILE
from openv41.io.trace import GREEDY_TOKENS, run_case
from openv41.io.trace_draft import DraftTrace
from openv41.io.trace_inputs import Inputs
from openv41.io.trace_values import as_stored, feed_tokens
from openv41.io.weight_rows import Rows, Weight
from openv41.layers.batch import Batch
from openv41.model.cache import DenseStore
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.ngram_hash_constants import num_embeddings
from openv41.presets import preset, with_drafter

DEFAULT = "fixture"
BATCH_SHAPE = (2, 64)
PACKED = (11, 1, 30)  # documents of one packed row
OURS = "openv41's own model in float64, not an independent implementation"

# Standard deviations of y in y = W x for x of unit variance, by our parameter names.
_GAINS = (
    (re.compile(r"(experts|shared)\.w[13]"), 4.0),  # some lanes pass the SwiGLU limit of 10
    (re.compile(r"(experts|shared)\.w2"), 0.2),
    (re.compile(r"gate\.weight"), 1.5),
    (re.compile(r"head\.weight"), 2.0),
)
_UNIT = re.compile(r"(^embed|\.table)\.weight")
_CENTERED = re.compile(r"(base|bias|bias_vl|sink|start|newline|end)$")

# Width and height of the images, and the text before each; the first span starts inside a group.
IMAGES = (((92, 60), 13), ((41, 110), 5))
TEXT_BEHIND_IMAGES = 23


@dataclass(frozen=True, kw_only=True)
class FixtureOptions:
    """What to make. Sizes that are None are those of the preset."""

    seed: int = 0
    preset: str = DEFAULT
    quantised: bool = True
    ties: bool = True
    length: int = 127
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_experts: int | None = None
    drafter: bool | None = None  # None: as the preset has one or none
    outputs: bool = True


def make_fixture(folder: Path, options: FixtureOptions) -> list[Rule]:
    """Write checkpoint, inputs, outputs and README; return which rules the sizes obey.

    The bytes depend on the options alone. The folder appears complete or not at all.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; name a new folder")
    config, tokenizer = fixture_config(options)
    tensors = draw_inputs(config, options)
    rules: list[Rule] = []
    with atomic_folder(folder) as partial:
        write_checkpoint(
            RandomWeights(options.seed),
            config,
            partial / "checkpoint",
            variant="released" if options.quantised else "bfloat16",
            companions={TOKENIZER_FILE: tokenizer.encode()},
        )
        write_tensors(partial / "inputs.safetensors", tensors, {"format": "pt"})
        if options.outputs:
            model = load_model(partial / "checkpoint", dtype=torch.float64)
            found = _write_outputs(model, partial, tensors)
            rules = check_rules(model, tensors) + check_draft_rules(model, tensors, found)
        (partial / "README.md").write_text(readme(options.seed, config, rules), encoding="utf-8")
    return rules


def fixture_config(options: FixtureOptions) -> tuple[ModelConfig, str]:
    """Configuration and tokenizer.json of a fixture: tokenizer, then its map, then the config."""
    config = _small(options.ties) if options.preset == DEFAULT else preset(options.preset)
    if options.drafter is not None:
        config = with_drafter(config) if options.drafter else replace(config, dspark=None)
    if options.vocab_size is not None and options.vocab_size < 64:
        raise InputError(f"vocab_size is {options.vocab_size}, must be at least 64")
    size = options.vocab_size or config.vocab_size
    tokenizer = toy_tokenizer(size)
    engram, dspark, moe = config.engram, config.dspark, config.moe
    if engram is not None:
        classes = len(set(compress_vocabulary(Tokenizer.from_str(tokenizer))))
        engram = replace(engram, compressed_vocab_size=classes)
    if dspark is not None:
        dspark = replace(dspark, noise_token_id=size - 2)
    changed = replace(
        config,
        vocab_size=size,
        hidden_size=options.hidden_size or config.hidden_size,
        moe=replace(moe, num_experts=options.num_experts or moe.num_experts),
        engram=engram,
        dspark=dspark,
        image_token_id=size - 1,
    )
    longest = options.length + GREEDY_TOKENS
    if options.length < 64 or longest > config.max_position:
        raise InputError(
            f"length is {options.length}, must be in 64..{config.max_position - GREEDY_TOKENS}"
        )
    return changed, tokenizer


def _small(ties: bool) -> ModelConfig:
    """Ten layers with every mode after a ratio-2 and after a ratio-1 source.

    With two index heads one query in four gives both a negative weight; entries that no head
    likes then score exactly 0 and tie at the top. With eight heads that does not happen.
    """
    return ModelConfig(
        vocab_size=384,
        hidden_size=64,
        num_layers=10,
        max_position=512,
        compress_ratios=(0, 0, 2, 2, 2, 1, 1, 1, 1, 1),
        kv_sources=(2, 5),
        index_sources=(2, 3, 5, 7),
        attention=AttentionConfig(
            num_heads=4,
            head_dim=32,
            rope_dim=16,
            q_rank=32,
            o_rank=32,
            o_groups=2,
            window_size=6,
            yarn=YarnConfig(factor=16.0, original_max_position=32),
        ),
        indexer=IndexerConfig(
            num_heads=2 if ties else 8,
            head_dim=32,
            top_k=6,
            candidate_source=5,
            candidate_blocks=4,
            block_size=4,
        ),
        moe=MoeConfig(num_experts=8, top_k=2, expert_dim=64),
        engram=EngramConfig(
            layer_ids=(1, 4),
            num_embeddings=num_embeddings(2, 3, 2, 150),
            table_size=150,
            num_heads=2,
            head_dim=32,
            compressed_vocab_size=384,
        ),
        vision=VisionConfig(
            num_layers=1,
            hidden_size=32,
            num_heads=2,
            intermediate_size=48,
            max_image_tokens=40,
            min_pixels=7056,
        ),
        dspark=DsparkConfig(
            num_stages=2,
            block_size=3,
            noise_token_id=382,
            target_layer_ids=(7, 8, 9),
            markov_rank=32,
            num_experts=4,
            top_k=2,
        ),
        image_token_id=383,
    )


def toy_tokenizer(size: int) -> str:
    """tokenizer.json of whole words; five spellings of each number, which make two classes."""
    words = ["<bos>", "<eos>", "<pad>", " ", "\n", "\t \n", "  "]
    spellings = ("w{}", " W{}", "\u1e83{}", "q{}  r", " Q{} R")
    words += [form.format(i) for i in range(size // 5 + 1) for form in spellings]
    words = [*words[: size - 1], "<image>"]
    special = {word: words.index(word) for word in ("<bos>", "<eos>", "<pad>", "<image>")}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": word, **flags, "special": True} for word, i in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: i for i, word in enumerate(words)},
            "unk_token": "<pad>",
        },
    }
    return json.dumps(content, ensure_ascii=False, indent=1)


def draw_inputs(config: ModelConfig, options: FixtureOptions) -> dict[str, Tensor]:
    """Tokens of every case; words repeat, so that n-grams do."""
    generator = _generator(options.seed, "inputs")
    pool = torch.randint(3, config.vocab_size - 2, (40,), generator=generator)

    def draw(*shape: int) -> Int[Tensor, "..."]:
        return pool[torch.randint(len(pool), shape, generator=generator)].to(torch.int32)

    length, window = options.length, config.attention.window_size
    prefill_len = length * 4 // 5 | 1  # odd: leaves a group half full
    edge, inner = min(17, length // 3), 22
    rows = {*range(edge), *range(length - edge, length)}
    rows |= {round(edge + i * (length - 2 * edge) / inner) for i in range(inner)}
    lengths = sorted({1, 2, 3, max(1, window - 1), window, window + 1, length - 2, length - 1})
    return {
        "text_ids": draw(length),
        "prefill_len": torch.tensor([prefill_len], dtype=torch.int32),
        "subset_positions": torch.tensor(sorted(rows), dtype=torch.int32),
        "batch_ids": draw(*BATCH_SHAPE),
        "prompt_lengths": torch.tensor([n for n in lengths if n < length], dtype=torch.int32),
        "packed_ids": draw(sum(PACKED)),
        "packed_lengths": torch.tensor(PACKED, dtype=torch.int32),
        **_draw_images(config, options.seed, draw),
    }


def _draw_images(
    config: ModelConfig, seed: int, draw: Callable[[int], Int[Tensor, " _"]]
) -> dict[str, Tensor]:
    """A text with two images of noise; nothing where the model sees none."""
    if config.vision is None:
        return {}
    generator, side = _generator(seed, "images"), config.vision.patch_size
    ids: list[Tensor] = []
    types: list[int] = []
    starts: list[int] = []
    grids, tensors = [], {}
    for number, ((width, height), before) in enumerate(IMAGES):
        grid = grid_of(width, height, config.vision)
        shape = (grid.num_patches, 3, side, side)
        pixels = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        tensors[f"image{number}.patches"] = ProcessedImage(pixels, grid).patches()
        starts.append(len(types) + before)
        span = torch.full((grid.span_length,), config.image_token_id, dtype=torch.int32)
        ids += [draw(before), span]
        types += [TEXT] * before + [int(token) for token in grid.layout()]
        grids.append(grid)
    return tensors | {
        "image_ids": torch.cat([*ids, draw(TEXT_BEHIND_IMAGES)]),
        "image_token_types": torch.tensor(types + [TEXT] * TEXT_BEHIND_IMAGES, dtype=torch.int32),
        "image_starts": torch.tensor(starts, dtype=torch.int32),
        "image_grids_vit": torch.tensor([(g.rows, g.cols) for g in grids], dtype=torch.int32),
        "image_grids_llm": torch.tensor(
            [(g.cell_rows, g.cell_cols) for g in grids], dtype=torch.int32
        ),
    }


class RandomWeights:
    """Weights drawn row by row; a value depends on the seed, the weight's name and its row."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def rows(self, weight: Weight, start: int, stop: int) -> Rows:
        """Plain float32 rows, which the writer quantises where the format wants it."""
        generator = _generator(self.seed, f"{weight.name} {start}")
        name, shape = weight.spec.ours, list(weight.spec.shape)
        if weight.spec.part == "weight" and weight.spec.weight_format == "fp4":
            shape[-1] *= 2  # two values to a byte
        drawn = (stop - start, *shape[1:])
        if len(shape) == 1 and not _CENTERED.search(name):
            return Rows(torch.rand(drawn, generator=generator) + 0.5, None)  # norms and scales
        if name.endswith(("q_weight", "k_weight")):
            return Rows(torch.rand(drawn, generator=generator) + 0.5, None)
        values = torch.randn(drawn, generator=generator)
        if len(shape) > 1 and not _UNIT.search(name):
            gain = next((gain for form, gain in _GAINS if form.search(name)), 1.0)
            values *= gain / math.sqrt(math.prod(shape[1:]))
        return Rows(values, None)


def _generator(seed: int, purpose: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _write_outputs(
    model: CausalEncoderDecoder, folder: Path, tensors: Mapping[str, Tensor]
) -> Mapping[str, Mapping[str, Tensor]]:
    """Write the outputs of every case; return them."""
    inputs = Inputs.read(folder / "inputs.safetensors")
    cases = ["prefill", "decode", "batch", *(["image"] if inputs.images else [])]
    found = {case: run_case(model, inputs, case, "f64") for case in cases}
    found["prompts"] = _answer_prompts(model, tensors)
    packed = _logits(model, tensors["packed_ids"].long(), tensors["packed_lengths"].tolist())
    found["packed"] = {"logits": packed}
    for case, values in found.items():
        about = {"format": "pt", "case": case, "numerics": "f64", "made_by": OURS}
        write_tensors(folder / f"{case}_f64.safetensors", values, about)
    return found


@torch.no_grad()
def _answer_prompts(
    model: CausalEncoderDecoder, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Logits of the last token of each prompt, and the drafts behind the likeliest next one."""
    ids, lengths, last = tensors["text_ids"].long(), tensors["prompt_lengths"], []
    drafted: list[dict[str, Tensor]] = []
    for length in lengths.tolist():
        store = DenseStore(model.config.compress_ratios)
        logits, seen = feed_tokens(model, store, ids[:length], 0)
        drafts = DraftTrace(model, store)
        drafts.commit(ids[:length], 0, seen)
        drafts.draft(logits, length)
        last.append(logits)
        drafted.append(drafts.tensors())
    names = drafted[0]
    traced = {name: as_stored(torch.cat([own[name] for own in drafted])) for name in names}
    return {"prompt_lengths": lengths, "logits": torch.stack(last), **traced}


@torch.no_grad()
def _logits(
    model: CausalEncoderDecoder, ids: Int[Tensor, " T"], lengths: list[int]
) -> Float[Tensor, "T V"]:
    return model.logits(model(Batch.packed(ids, lengths)).hidden)
