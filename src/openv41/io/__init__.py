"""Outside formats: configuration, checkpoints, tokenizers."""
