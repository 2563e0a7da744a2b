"""Runs that take moments: a mini model, a few steps of a few tokens."""

import json
from dataclasses import replace

import torch

from openv41.io.engram_map import token_map_for
from openv41.io.token_classes import compress_vocabulary
from openv41.io.tokenizer import load_tokenizer
from openv41.ngram_hash_constants import num_embeddings
from openv41.presets import with_vocabulary
from openv41.train.config import TrainConfig
from openv41.train.loop import Run
from openv41.train.metrics import LOG_FILE
from openv41.train.stages import Stage
from tests.layers.mini import mini_config

SETTINGS = {
    "tokens": 6 * 32,
    "sequence_length": 16,
    "batch_tokens": 32,
    "warmup_tokens": 64,
    "checkpoint_steps": 2,
    "heldout_steps": 3,
    "heldout_tokens": 60,
    "seed": 3,
}


def short_config():
    """The mini model with four layers: window, Full (both ratios), Reuse."""
    return replace(
        mini_config(),
        num_layers=4,
        compress_ratios=(0, 2, 1, 1),
        kv_sources=(1, 2),
        index_sources=(1, 2),
        indexer=replace(mini_config().indexer, candidate_source=2),
        engram=replace(
            mini_config().engram, layer_ids=(1,), num_embeddings=num_embeddings(1, 3, 2, 20)
        ),
        image_token_id=1_000_000,
    )


def mini_run(shards, out, *, heldout=None, **changes):
    backend = load_tokenizer(shards.folder).backend
    config = with_vocabulary(
        short_config(),
        vocab_size=shards.index.vocab_size,
        compressed_vocab_size=len(set(compress_vocabulary(backend))),
    )
    return Run(
        model=config,
        stages=(Stage(name="pretrain", train=TrainConfig(**{**SETTINGS, **changes})),),
        token_map=token_map_for(shards.folder, config),
        data=shards.folder,
        heldout=heldout,
        out=out,
        device=torch.device("cpu"),
    )


def read_log(folder):
    """Records without figures of speed, which differ between runs."""
    lines = (folder / LOG_FILE).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [{k: v for k, v in r.items() if not k.endswith("per_second")} for r in records]


def changed(run, **changes):
    """The run with other settings in its one stage."""
    [stage] = run.stages
    return replace(run, stages=(replace(stage, train=replace(stage.train, **changes)),))
