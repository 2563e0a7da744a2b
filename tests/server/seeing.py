"""A tiny random checkpoint that sees, and whose tokenizer has the prompt format's tokens."""

import base64
import io
from dataclasses import replace
from importlib import resources

import torch
from PIL import Image
from tokenizers import AddedToken

from openv41.config import VisionConfig
from openv41.io.checkpoint import save_model
from openv41.io.checkpoint_writer import read_companions
from openv41.io.engram_map import compress_vocabulary
from openv41.io.tokenizer import TextTokenizer, train_tokenizer
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.init import init_weights
from openv41.presets import with_vocabulary
from openv41.prompt import tokens
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
VISION = VisionConfig(
    num_layers=1, hidden_size=8, num_heads=2, intermediate_size=8, patch_size=2, min_pixels=1
)
SAMPLES = "{}[]:,0123456789\n\n</ <_-.\n" * 3 + "Paris Berlin true false null question answer\n" * 3


def make_tokenizer(folder):
    """A tokenizer that knows the words of the format, so that prompts are short."""
    data = resources.files("openv41.prompt") / "data"
    text = "".join((data / name).read_text() for name in ("tools.txt", "effort.txt"))
    (folder / "text.txt").write_text(text + SAMPLES)
    trained = train_tokenizer([folder / "text.txt"], vocab_size=512)
    trained.backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPELLED]
    )
    return TextTokenizer(trained.backend.to_str().encode(), "the tokenizer that sees")


def make_seeing(folder, *, seed=1, vision=VISION, std=None):
    """A checkpoint; ``std`` of its output head, whose answers are dull otherwise."""
    tokenizer = make_tokenizer(folder)
    tokenizer.save(folder / "tokenizer")
    config = with_vocabulary(
        short_config(),
        vocab_size=tokenizer.vocab_size,
        compressed_vocab_size=len(set(compress_vocabulary(tokenizer.backend))),
    )
    image_token = tokenizer.special_id(tokens.IMAGE)
    config = replace(config, max_position=8192, vision=vision, image_token_id=image_token)
    model = CausalEncoderDecoder(config, dtype=torch.float32)
    init_weights(model, seed)
    if std is not None:
        with torch.no_grad():
            model.head.weight.normal_(0, std, generator=torch.Generator().manual_seed(seed))
    save_model(model, folder / "seeing", companions=read_companions(folder / "tokenizer"))
    return folder / "seeing"


def png(seed, width=12, height=6):
    """Bytes of a random picture."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), pixels.numpy().tobytes()).save(file, "PNG")
    return file.getvalue()


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data):
    return {"type": "image_url", "image_url": {"url": data_url(data)}}
