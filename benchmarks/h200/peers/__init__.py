"""Kernels of other projects at our shapes, each in a process of its own.

None of them is part of this repository. docs/performance.md says how they are packed and named.
"""
