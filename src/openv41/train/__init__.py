"""Training: data, optimisation, checkpoints, metrics."""
