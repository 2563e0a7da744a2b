"""A tiny random checkpoint, with a tokenizer."""

from dataclasses import replace

import torch

from openv41.io.checkpoint import save_model
from openv41.io.checkpoint_writer import read_companions
from openv41.io.engram_map import compress_vocabulary
from openv41.io.tokenizer import train_tokenizer
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.init import init_weights
from openv41.presets import with_vocabulary
from tests.train.runs import short_config


def make_checkpoint(folder, max_position=512):
    (folder / "text.txt").write_text("To be, or not to be, that is the question.\n")
    tokenizer = train_tokenizer([folder / "text.txt"], vocab_size=262)
    tokenizer.save(folder / "tokenizer")
    classes = len(set(compress_vocabulary(tokenizer.backend)))
    config = with_vocabulary(
        replace(short_config(), max_position=max_position),
        vocab_size=262,
        compressed_vocab_size=classes,
    )
    model = CausalEncoderDecoder(config, dtype=torch.float32)
    init_weights(model, 1)
    save_model(model, folder / "tiny", companions=read_companions(folder / "tokenizer"))
    return folder / "tiny"
