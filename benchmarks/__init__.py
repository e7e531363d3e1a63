"""Benchmarks. Each compares all sides on one machine; run one with ``python -m benchmarks.<name>``."""
