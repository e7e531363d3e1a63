"""Random calls of `wire_`: each raises WiringError and leaves the model unchanged, or wires it, and it trains."""

from __future__ import annotations

import inspect
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import wirings
from tests.fuzz.runner import MISTAKE, Fuzzer
from wirings import CubicSchedule, LinearSchedule, WiringError, rules

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 10**6, 2**70, 0.0, 0.3, 0.5, 1.0, 1.5, -0.1, 1e-9, 1e300),
    *(float("nan"), float("inf"), -float("inf"), np.int64(3), np.float32(0.5), np.nan, 1j, "", "x", "*", "0", b"x"),
    *([], [1], ["*"], ["0*"], [None], (), (2, 3), {}, {"*": 0.5}, {"0*": 3}, {"*": None}, {"x": 1}, {1: 2}, set()),
    *(torch.zeros(50, 50), torch.tensor(0.5), torch.ones(3, 3, dtype=torch.bool), torch.tensor(float("nan"))),
    *(nn.ReLU, len, object(), "[", np.zeros((30, 30))),
)


class Tied(nn.Module):
    """Two layers that share their weight, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(5, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x + self.table.weight[0]))


class Recurrent(nn.Module):
    """A recurrent layer and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.attention = nn.LSTM(6, 4, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lstm(x[:, None].expand(-1, 3, -1))[0]
        return self.attention(y, y, y, need_weights=False)[0]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (6,)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, groups=2)), (2, 6, 6)
    ),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.Conv2d(3, 1, 1, bias=False)), (2, 3, 3)),
    "tied": (Tied, (6,)),
    "recurrent": (Recurrent, (6,)),
    "one edge": (lambda: nn.Sequential(nn.Linear(1, 1)), (1,)),
    "nothing": (lambda: nn.Sequential(nn.ReLU()), (6,)),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(6)), (6,)),
    "frozen": (lambda: nn.Sequential(nn.Linear(6, 4).requires_grad_(False), nn.Linear(4, 2)), (6,)),
    "double": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)).double(), (6,)),
}  # fmt: skip
RULES = tuple(rules.names())
STRUCTURES = (
    *("free", "row", "column", "1:2", "2:4", "1:1", "3:6", "2x2", "1x3", "3x2, padded", "5x5,padded", " 2 × 2 "),
    *("1:2, transposable", "2:2,transposable"),
    *("2:1", "0:4", "4:0", "-1:2", "2:4:8", "2;4", "0x2", "2x", "x", "2x2, Padded", "1e1x2", "²:4", "٣:٤", "2x2\0"),
    *("9" * 9 + ":" + "9" * 9, "9" * 5000 + "x2", "999999999x999999999, padded", "999999999x1", "row, padded", "FREE"),
    *("2:5, transposable", "2:4, padded", "3:2, transposable", "2x2, transposable", "1:2, transposable, transposable"),
    "2" + " " * 10**6 + "x2",
)
"""Structures, of which the first fourteen are valid, and fit some models."""


def rule_of(draw: random.Random) -> Any:
    """A rule, its name, or something else."""
    if draw.random() < 0.1:
        return draw.choice(ODD)
    name = draw.choice(RULES)
    if draw.random() < 0.6:
        return name
    names = list(inspect.signature(type(rules.get(name))).parameters)
    options = {draw.choice(names): draw.choice(ODD) for _ in range(draw.randint(0, 2)) if names}
    return rules.get(name, **options)


def amount(draw: random.Random) -> Any:
    """A budget: mostly a density."""
    if draw.random() < 0.7:
        return draw.uniform(0.01, 1)
    if draw.random() < 0.5:
        return draw.choice((0.2, 1.0, 5, 20, len))
    kind = draw.choice((LinearSchedule, CubicSchedule))
    return kind(*(draw.choice((draw.uniform(0, 1), 0.5, 1.0, *ODD)) if draw.random() < 0.2 else 0.5 for _ in range(3)))


def arguments(draw: random.Random, shape: tuple[int, ...]) -> dict[str, Any]:
    """Arguments of which most are valid."""
    given: dict[str, Any] = {}
    kind = draw.choice(("density", "density", "density", "k", "budget", "params", "mult_adds"))
    kind = "two" if draw.random() < 0.03 else kind
    if kind in ("density", "two"):
        given["density"] = amount(draw)
    if kind in ("k", "two"):
        given["k"] = draw.randint(1, 60)
    if kind == "budget":
        given["budget"] = {draw.choice(("*", "0*", "2.weight", "first", "x")): amount(draw)}
    if kind in ("params", "mult_adds"):
        given[kind] = draw.choice((draw.uniform(0.1, 1.0), draw.randint(1, 2000)))
    if kind == "mult_adds" and draw.random() < 0.8:
        given["example_input"] = draw.choice((shape, torch.randn(2, *shape)))
    if draw.random() < 0.25:
        given["structure"] = structure = draw.choice(STRUCTURES[:14] if draw.random() < 0.8 else STRUCTURES)
        if ":" in structure and draw.random() < 0.8:  # which fixes the number of edges
            del given[next(iter(given))]
    usual = {
        "share": ("uniform", "erk", "global", "scaled"), "include": (["*"], ["0*"], ["*weight"]),
        "skip": (["0*"], ["*"]),
        "allowed": ({"*": torch.ones(3, 3, dtype=torch.bool)}, {"0": torch.rand(8, 6) < 0.5}),
        "axes": ({"*": "out in"}, {"0": "in out"}), "scale_weights": (True, 2.0), "start": ("weights",),
    }  # fmt: skip
    for name, values in usual.items():
        if draw.random() < 0.06:
            given[name] = draw.choice(values)
    for _ in range(draw.choice((0, 0, 0, 0, 1, 2))):
        name = draw.choice(
            (*usual, "density", "k", "budget", "params", "mult_adds", "example_input", "sparsity", "structure")
        )
        given[name] = draw.choice(ODD)
    return given


def same_model(model: nn.Module, before: dict[str, Tensor]) -> bool:
    """Whether a model is plain, with the same weights as before."""
    after = model.state_dict()
    plain = not any(hasattr(module, "parametrizations") for module in model.modules())
    return plain and after.keys() == before.keys() and all(torch.equal(x, before[name]) for name, x in after.items())


def whole_groups(structure: Any, mask: Tensor) -> bool:
    """Whether a matrix has whole groups only; True for other weights, and for blocks that may be cut off."""
    text = str(structure).replace(" ", "").replace("×", "x")
    if mask.dim() != 2:
        return True
    if match := re.fullmatch(r"(\d+):(\d+)", text):
        counts = mask.unflatten(1, (-1, int(match[2]))).sum(-1)
        return bool((counts == counts.flatten()[0]).all())
    sizes = {"row": (1, mask.shape[1]), "column": (mask.shape[0], 1)}.get(text)
    if match := re.fullmatch(r"(\d+)x(\d+)", text):
        sizes = int(match[1]), int(match[2])
    if sizes is None:
        return True
    counts = mask.unflatten(1, (-1, sizes[1])).unflatten(0, (-1, sizes[0])).sum((1, 3))
    return bool(((counts == 0) | (counts == sizes[0] * sizes[1])).all())


def trained(model: nn.Module, wiring: Any, shape: tuple[int, ...], structure: Any = "free") -> str:
    """Train a wired model for two steps, and finalize it. Returns what went wrong."""
    dtype = next(model.parameters()).dtype
    parameters = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    wiring.plan(3)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, *shape, dtype=dtype)).square().mean().backward()
        optimizer.step()
        wiring.step(optimizer)
    if not all(whole_groups(structure, mask) for mask in wiring.masks().values()):
        return f"parts of groups are real with structure={structure!r}"
    shown, kept = str(wiring), {name: int(mask.sum()) for name, mask in wiring.masks().items()}
    wirings.finalize_(model)
    result = model(torch.randn(2, *shape, dtype=dtype))
    if not bool(torch.isfinite(result).all()) or not shown:
        return "the output is not finite"
    for name, count in kept.items():
        own, _, last = name.rpartition(".")
        weight = model.get_parameter(name) if last in ("weight",) or hasattr(model.get_submodule(own), last) else None
        if weight is not None and int(weight.count_nonzero()) > count:
            return f"{name} has more than its {count} edges"
    return ""


def case(_: None, folder: Path, seed: int) -> str:
    """Call `wire_` at random."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    make, shape = MODELS[draw.choice(sorted(MODELS))]
    model = make()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    wired = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rule, given = rule_of(draw), arguments(draw, shape)
            wiring = wirings.wire_(model, rule, **given)
            wired = True
            problem = trained(model, wiring, shape, given.get("structure", "free"))
    except WiringError as error:
        said = str(error)
        if len(said) > 1000:
            return f"{MISTAKE}: a long message: {said[:200]}"
        if wired:
            return "refused later"
        return (
            "refused" if same_model(model, before) else f"{MISTAKE}: refused, but the model has changed: {said[:100]}"
        )
    return f"{MISTAKE}: {problem}" if problem else "wired and trained"


FUZZERS = {"wire calls": Fuzzer(lambda folder: None, case, chunk=1000, short=400)}
