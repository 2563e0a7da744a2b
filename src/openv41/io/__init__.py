"""Formats of the outside world: checkpoints, tokenizers, configurations."""
