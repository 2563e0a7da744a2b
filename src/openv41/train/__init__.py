"""Training: data, recipe, loop."""
