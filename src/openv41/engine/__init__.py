"""Inference: sampling and generation."""
