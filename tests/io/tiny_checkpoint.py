"""Tiny random checkpoints with their tokenizers: plain ones, and ones that see and chat."""

from dataclasses import replace
from importlib import resources

import torch
from tokenizers import AddedToken

from openv41.io.checkpoint import save_model
from openv41.io.checkpoint_writer import read_companions
from openv41.io.token_classes import compress_vocabulary
from openv41.io.tokenizer import TextTokenizer, train_tokenizer
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.init import init_weights
from openv41.presets import with_vocabulary
from openv41.prompt import tokens
from tests.layers.mini import VISION
from tests.train.runs import short_config

SPELLED = (
    tokens.SYSTEM,
    tokens.USER,
    tokens.ASSISTANT,
    tokens.THINK,
    tokens.THINK_END,
    tokens.DSML,
    tokens.LATEST_REMINDER,
    tokens.IMAGE,
)
SAMPLES = "{}[]:,0123456789\n\n</ <_-.\n" * 3 + "Paris Berlin true false null question answer\n" * 3


def make_tokenizer(folder):
    """A tokenizer that knows the words of the prompt format, so that prompts are short."""
    data = resources.files("openv41.prompt") / "data"
    text = "".join((data / name).read_text() for name in ("tools.txt", "effort.txt"))
    (folder / "text.txt").write_text(text + SAMPLES)
    trained = train_tokenizer([folder / "text.txt"], vocab_size=512)
    trained.backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPELLED]
    )
    return TextTokenizer(trained.backend.to_str().encode(), "the tokenizer that sees")


def make_checkpoint(folder, tokenizer=None, *, seed=1, std=None, **changes):
    """A checkpoint; ``std`` of its output head, whose answers are dull otherwise."""
    if tokenizer is None:
        (folder / "text.txt").write_text("To be, or not to be, that is the question.\n")
        tokenizer = train_tokenizer([folder / "text.txt"], vocab_size=262)
    tokenizer.save(folder / "tokenizer")
    config = with_vocabulary(
        short_config(),
        vocab_size=tokenizer.vocab_size,
        compressed_vocab_size=len(set(compress_vocabulary(tokenizer.backend))),
    )
    model = CausalEncoderDecoder(replace(config, **changes), dtype=torch.float32)
    init_weights(model, seed)
    if std is not None:
        with torch.no_grad():
            model.head.weight.normal_(0, std, generator=torch.Generator().manual_seed(seed))
    save_model(model, folder / "tiny", companions=read_companions(folder / "tokenizer"))
    return folder / "tiny"


def make_seeing(folder):
    """A checkpoint that sees and whose chats are in the prompt format."""
    tokenizer = make_tokenizer(folder)
    image = tokenizer.special_id(tokens.IMAGE)
    sizes = {"max_position": 8192, "vision": VISION, "image_token_id": image}
    return make_checkpoint(folder, tokenizer, std=0.3, **sizes)
