"""Measurements; each writes JSON lines to results/."""
