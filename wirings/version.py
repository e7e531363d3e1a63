"""The version, on its own so that packaging can read it without importing PyTorch."""

__version__ = "0.1.0"
