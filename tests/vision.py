"""torchvision for the tests, also where its compiled part does not fit the installed PyTorch: its models need none."""

import importlib
import sys

import torch


def missing() -> str | None:
    """Why torchvision cannot be imported; None if it can."""
    try:
        importlib.import_module("torchvision")
        return None
    except ImportError as error:
        return f"pip install torchvision: {error}"
    except RuntimeError as error:  # it asks for operators that its compiled part would have brought
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
