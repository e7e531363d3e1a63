"""Initial values of the learned scales of norms."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from wirings.graph.nodes import Convolutions


def draw_norm_scales(model: nn.Module) -> None:
    """Draw the scales of all batch and instance norms uniformly from 0 to 1, including those of a graph's nodes.

    PyTorch did so before version 1.2 and has initialised them to 1 since. Networks from papers of that time may need it
    to train as they did. If a wiring is learned, fewer nodes lose their edges in the first steps.
    """
    for module in model.modules():
        if isinstance(module, Convolutions):
            scale = module.norm_weight
        elif isinstance(module, _NormBase):
            scale = module.weight
        else:
            continue
        if scale is not None:
            nn.init.uniform_(scale)
