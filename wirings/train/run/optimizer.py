"""The optimizer of a run: SGD or AdamW, with separate weight decays."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from wirings.budgets.budget import matches
from wirings.errors import WiringError
from wirings.train.settings import Settings
from wirings.wire.ham import HAM
from wirings.wire.handle import Wiring

STATE = {"sgd": ("momentum_buffer",), "adamw": ("step", "exp_avg", "exp_avg_sq")}
"""What each optimizer keeps for a parameter: tensors of its shape, but ``step``, which is a scalar."""


def make_optimizer(
    model: nn.Module, wiring: Wiring | None, settings: Settings, device: torch.device
) -> torch.optim.Optimizer:
    """Make the optimizer, with weight decays for edges, for norms and biases, and without for ``no_decay``."""
    chosen = settings.optimizer
    without = _matching(model, chosen.no_decay)
    edges = {id(layer.weight) for layer in wiring.layers} if wiring is not None else set()
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        decay = chosen.weight_decay
        if id(parameter) in without:
            decay = 0.0
        elif id(parameter) in edges:
            decay = decay if chosen.weight_decay_edges is None else chosen.weight_decay_edges
        elif parameter.dim() <= 1 and not chosen.weight_decay_norms:
            decay = 0.0
        groups.setdefault(decay, []).append(parameter)
    on_gpu = device.type == "cuda"
    decayed = [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()]
    # A tensor, so that a captured step sees it change.
    lr = torch.tensor(chosen.lr, device=device) if on_gpu else chosen.lr
    optimizer: torch.optim.Optimizer
    if chosen.name == "adamw":
        first, second = chosen.betas
        optimizer = torch.optim.AdamW(
            decayed, lr=lr, betas=(first, second), eps=chosen.eps, fused=on_gpu, capturable=on_gpu
        )
    else:
        optimizer = torch.optim.SGD(decayed, lr=lr, momentum=chosen.momentum, nesterov=chosen.nesterov, fused=on_gpu)
    if chosen.ham_alpha or chosen.ham_beta:
        HAM(optimizer, wiring, alpha=chosen.ham_alpha, beta=chosen.ham_beta)
    return optimizer


def _matching(model: nn.Module, patterns: Sequence[str]) -> set[int]:
    """The `id` of every parameter that a pattern matches; raises if a pattern matches none."""
    named = {plain_name(name): id(p) for name, p in model.named_parameters()}
    for pattern in patterns:
        if not any(matches(name, pattern) for name in named):
            raise WiringError(
                f"optimizer.no_decay: {pattern!r} matches no parameter of the model. Its parameters: "
                f"{', '.join(list(named)[:12])}{', …' if len(named) > 12 else ''}."
            )
    return {key for name, key in named.items() if any(matches(name, pattern) for pattern in patterns)}


def plain_name(name: str) -> str:
    """The name that a parameter of a wired model has in the model without wiring.

    >>> plain_name("head.parametrizations.weight.original"), plain_name("head.bias")
    ('head.weight', 'head.bias')
    """
    return re.sub(r"(^|\.)parametrizations\.([^.]+)\.original$", r"\1\2", name)
