"""A small GPT on the bytes of a text, trained with AdamW: what several benchmarks of rules share."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wirings
from wirings import models
from wirings.rules import Rule

LAYERS, HEADS, WIDTH, CONTEXT, BATCH, DENSITY, DECAY = 2, 4, 64, 64, 32, 0.1, 0.1
TEST_BATCHES = 64
SETTINGS = {"network": f"gpt {LAYERS} × {WIDTH}, {HEADS} heads", "context": CONTEXT, "batch": BATCH, "density": DENSITY}

Decays = Literal["all", "real", "none"]
"""Which edges decay: all, only real ones, or none. Other weights, such as embeddings, decay in any case."""


def read(file: Path) -> Tensor:
    """The bytes of a file as tokens."""
    return torch.from_numpy(np.frombuffer(file.read_bytes(), np.uint8).astype(np.int64))


def train(
    rule: Rule,
    rate: float,
    seed: int,
    text: Tensor,
    steps: int,
    *,
    scale_weights: bool = False,
    decays: Decays = "all",
    watch: Callable[[wirings.Wiring], None] = lambda _: None,
) -> nn.Module:
    """Train a network on a text: a warm-up in a tenth of the steps, then a cosine to a tenth of the learning rate.

    ``watch`` is called before the first step and after every step.
    """
    torch.manual_seed(seed)
    model = models.get("gpt", classes=256, context=CONTEXT, layers=LAYERS, heads=HEADS, width=WIDTH, rule="dense")
    budget = {} if rule.name == "dense" else {"density": DENSITY, "scale_weights": scale_weights}
    wiring = wirings.wire_(model, rule, skip=["head"], **budget)
    wiring.plan(steps)
    wired = [layer.weight for layer in wiring.layers]
    ids = {id(weight) for weight in wired}
    rest = [p for p in model.parameters() if id(p) not in ids]
    groups = [
        {"params": wired, "weight_decay": DECAY if decays == "all" else 0.0},
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    warm = steps // 10
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min((i + 1) / warm, 1.0) * (0.1 + 0.45 * (1 + math.cos(math.pi * max(i - warm, 0) / (steps - warm)))),
    )
    draw = torch.Generator().manual_seed(seed)
    watch(wiring)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, windows(text, draw)).backward()
        wiring.clip_grad_norm_(1.0)
        if decays == "real":  # as AdamW does it, before its step
            shrink = 1 - cosine.get_last_lr()[0] * DECAY
            with torch.no_grad():
                for weight, mask in zip(wired, wiring.masks().values(), strict=True):
                    weight.copy_(torch.where(mask, weight * shrink, weight))
        optimizer.step()
        cosine.step()
        wiring.step(optimizer)
        watch(wiring)
    return model.eval()


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: Tensor) -> float:
    """What the network has on random windows of a text, the same in every call."""
    draw = torch.Generator().manual_seed(0)
    return statistics.mean(float(loss_of(model, windows(text, draw))) for _ in range(TEST_BATCHES)) / math.log(2)


def windows(text: Tensor, draw: torch.Generator) -> Tensor:
    """A batch of random windows, (batch, context + 1)."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=draw)
    return text[starts[:, None] + torch.arange(CONTEXT + 1)]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def settings(text: Tensor, steps: int) -> dict[str, Any]:
    """What a record says about these trainings."""
    return {**SETTINGS, "bytes": len(text), "steps": steps}
