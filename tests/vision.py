"""Import torchvision, even if its compiled extension does not match the installed PyTorch.

The models that the tests use do not need the extension.
"""

import importlib
import sys

import torch


def missing() -> str | None:
    """Return why torchvision cannot be imported, or None if it can."""
    try:
        importlib.import_module("torchvision")
        return None
    except ImportError as error:
        return f"pip install torchvision: {error}"
    except RuntimeError as error:  # it needs operators that the compiled extension registers
        reason = str(error)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    try:
        importlib.import_module("torchvision")
        return None
    except (ImportError, RuntimeError):
        return f"pip install torchvision: {reason}"


MISSING = missing()
