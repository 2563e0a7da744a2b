"""The kernels on one NVIDIA H200: each op beside its floor, its reference and its peers.

``python -m benchmarks.run h200 --op NAME`` measures the rows of ``benchmarks/h200/NAME.py``;
``python -m benchmarks.h200.NAME`` is the short form, without peers. See ``rows`` for how a row is
declared and docs/performance.md for the protocol.
"""
