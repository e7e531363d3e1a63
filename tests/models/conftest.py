"""Networks that are torchvision's are tested wherever it is installed."""

import vision

__all__ = ["vision"]
