"""Recipes of torchvision's networks are tested wherever it is installed."""

import vision

__all__ = ["vision"]
