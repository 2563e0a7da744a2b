"""The model as float64 loops, written from its specification; imports nothing from the package."""
