"""Benchmarks: each compares both sides in one process. Run with ``python -m benchmarks.<name>``."""
