"""Odd arguments of the functions that prune, wire, save, ship, share and generate.

Each call works, or raises a `WiringError` and leaves the model unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import wirings
from tests.fuzz.runner import MISTAKE, Fuzzer
from wirings import WiringError, engine, hub, models, rules
from wirings.history import snapshot_of
from wirings.models.beam_search import beam_search
from wirings.train import data
from wirings.train.data.bleu import bleu
from wirings.train.generate import generate

X, LABELS = torch.linspace(-1, 1, 48).view(6, 8), torch.zeros(6, dtype=torch.int64)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 10**9, 2**63, 10**30, 0.0, 0.5, -0.5, 1.5, 1e-300, 1e308),
    *(float("nan"), float("inf"), -float("inf"), 1j, np.float32(0.5), np.int64(3), np.nan, np.zeros(3)),
    *("2:4", "4x2", "row", "2:1", "3x3, padded", "9" * 5000 + ":2", "2" + " " * 10**6 + "x2"),
    *("", "x", "é\x1b[31m", "*", "[", "\0", "a" * 1000, "dnw", "int8", b"x", Path("x"), torch.float16, torch.int8),
    *([], [0], ["*"], [None], (), {}, {"x": 1}, {"*": 0.5}, {"0.weight": float("nan")}, {1: 2}, set(), range(3)),
    *(object(), int, len, lambda *_: 1, nn.Linear(2, 2)),
    *(torch.zeros(0), torch.zeros(3), torch.tensor(0.5), torch.tensor(float("nan")), torch.zeros(2, 8, device="meta")),
    *([X], [(X, LABELS)], [X[:, :3]], [X[:0]], [X.double()], [X.to_sparse()], [X * float("nan")], X[:1], (8,), (0,)),
)

# ---- models ----------------------------------------------------------------------------------------------------------


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def sparse() -> nn.Module:
    model = plain()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= torch.rand_like(parameter) < 0.5
    return model


def shared() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    return model


def diverged() -> nn.Module:
    model = plain()
    model[0].weight.data[0], model[2].weight.data[0] = float("nan"), float("inf")
    return model


def wired(rule: str = "dnw") -> nn.Module:
    model = plain()
    wirings.wire_(model, rule, density=0.5)
    return model


def oddly_named() -> nn.Module:
    model = nn.Sequential()
    model.add_module("\x1b[31mé\n'\"", nn.Linear(8, 4))
    return model


MODELS: tuple[Callable[[], Any], ...] = (
    *(plain, sparse, shared, diverged, wired, lambda: wired("set"), oddly_named, nn.Identity, nn.Sequential),
    *(lambda: plain().requires_grad_(False), lambda: plain().to("meta"), lambda: plain().half()),
    *(lambda: nn.Sequential(nn.Linear(0, 4), nn.Linear(4, 0)), lambda: nn.Linear(8, 4, dtype=torch.complex64)),
    *(lambda: nn.LazyLinear(4), lambda: nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 4)), lambda: nn.Linear),
    *(lambda: nn.DataParallel(plain()), lambda: torch.jit.script(plain()), lambda: 3, lambda: None, lambda: "x"),
)

# ---- calls -----------------------------------------------------------------------------------------------------------


def described(structure: str = "free") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the state of a wired model."""
    model = plain()
    wiring = wirings.wire_(model, "rigl", density=0.5, structure=structure)
    return wiring.describe(), model.state_dict()


def step_with_ham(**given: Any) -> None:
    model = plain()
    wiring = wirings.wire_(model, "dnw", density=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"optimizer": optimizer, "wiring": wiring, **given}
    ham = wirings.HAM(options.pop("optimizer"), options.pop("wiring"), **options)
    model(X).square().sum().backward()
    optimizer.step()
    ham.remove()


@functools.cache
def generator() -> Any:
    model = models.get("gpt", layers=1, width=16, heads=2, context=8, classes=11)
    return engine.compile(model, torch.zeros(1, 8, dtype=torch.int64), engine="sparse", threads=1).generator()


def draw_tokens(prompt: Any = (1, 2), length: Any = 3, **given: Any) -> None:
    generator().reset()
    list(generator().generate(prompt, length, **given))


def shipped(model: nn.Module, **given: Any) -> None:
    if type(seconds := given.get("seconds")) in (int, float) and 1 < seconds < float("inf"):
        given["seconds"] = 0.001  # it would take as long as it says
    wirings.ship(model, **{"example_input": X[:1], "seconds": 0.001, "threads": 1, **given})


def compiled(model: nn.Module, **given: Any) -> None:
    engine.compile(model, **{"example_input": X[:1], "engine": "sparse", "threads": 1, **given})


def exported(model: nn.Module, **given: Any) -> None:
    engine.compile(model, X[:1], engine="sparse", threads=1).export(**{"folder": "exported", **given})


def translated(**given: Any) -> None:
    model = models.get("seq2seq", layers=1, width=16, heads=2, hidden=16, classes=20).eval()
    beam_search(model, **{"source": torch.full((2, 5), 4), "longest": 4, **given})


def saved_and_loaded(model: nn.Module, **given: Any) -> None:
    wirings.save_sparse(model, "file.safetensors", **given)
    wirings.load_sparse(model, "file.safetensors")


Call = tuple[Callable[..., Any], tuple[str, ...]]
ON_MODELS: dict[str, Call] = {
    "prune_": (
        lambda model, **given: wirings.prune_(model, **{"batches": [(X, LABELS)], "density": 0.5, **given}),
        ("batches", "density", "by", "include", "skip"),
    ),
    "wire_ keep": (lambda model, **given: wirings.wire_(model, "keep", **given), ("start", "density", "k", "share")),
    "wire_ start": (
        lambda model, **given: wirings.wire_(model, "rigl", **{"start": "weights", **given}),
        ("start", "density", "k", "share", "params", "scale_weights", "axes", "allowed", "include", "skip", "budget"),
    ),
    "wire_ structure": (
        lambda model, **given: wirings.wire_(model, "rigl", **{"density": 0.5, "structure": "4x2", **given}),
        ("structure", "structure", "density", "k", "share", "params", "budget", "allowed", "axes", "start"),
    ),
    "wire_ two budgets": (
        lambda model, **given: wirings.wire_(
            model, "dnw", **{"k": 40, "mult_adds": 50, "example_input": X[:1], **given}
        ),
        ("k", "mult_adds", "example_input", "density", "params", "share"),
    ),
    "save_sparse": (saved_and_loaded, ("dtype",)),
    "load_sparse": (lambda model: wirings.load_sparse(model, "sparse.safetensors"), ()),
    "rewire_": (
        lambda model, **given: wirings.rewire_(model, **{"saved": described()[0], "state": described()[1], **given}),
        ("saved", "state", "allowed"),
    ),
    "rewind_": (lambda model, **given: wirings.rewind_(model, **{"state": plain().state_dict(), **given}), ("state",)),
    "merge_adapters_": (wirings.merge_adapters_, ()),
    "finalize_": (wirings.finalize_, ()),
    "unwire_": (wirings.unwire_, ()),
    "snapshot_of": (snapshot_of, ()),
    "compact": (lambda model, **given: wirings.compact(model, **{"example_input": X[:1], **given}), ("example_input",)),
    "engine.compile": (compiled, ("example_input", "engine", "threads")),
    "EngineModel.export": (exported, ("folder", "name", "target")),
    "ship": (shipped, ("example_input", "data", "threads", "seconds", "dtype", "name")),
    "save_pretrained": (
        lambda model, **given: hub.save_pretrained(model, **{"folder": "saved", "card": False, **given}),
        ("folder", "results", "name", "card", "best", "sparse"),
    ),
}
"""Functions of a model, and their other parameters."""
OTHERS: dict[str, Call] = {
    "HAM": (step_with_ham, ("optimizer", "wiring", "alpha", "beta", "limit")),
    "TokenGenerator.generate": (draw_tokens, ("prompt", "length", "temperature", "top_k", "generator")),
    "beam_search": (translated, ("source", "beams", "penalty", "longest")),
    "bleu": (
        lambda **given: bleu(**{"translations": ["a b"], "references": ["a b"], **given}),
        ("translations", "references"),
    ),
    "generate": (
        lambda **given: list(generate("no run", **given)),
        ("prompt", "length", "temperature", "top_k", "seed", "best", "device"),
    ),
    "data": (
        lambda **given: data.load("text", **{"directory": "text", "batch": 4, "context": 8, **given}),
        ("directory", "batch", "context", "epoch_steps", "holdout", "seed", "workers", "image_size"),
    ),
}
CHANGES_NOTHING = (
    "prune_",
    *(name for name in ON_MODELS if name.startswith("wire_")),
    "load_sparse",
    "rewire_",
    "rewind_",
)
"""Functions that change a model, but not if they raise."""


def prepare(folder: Path) -> Path:
    """Write the files that calls read. Cases run in the folder."""
    wirings.save_sparse(sparse(), folder / "sparse.safetensors")
    (folder / "text").mkdir()
    (folder / "text" / "train.txt").write_text("a b c d " * 100)
    (folder / "text" / "val.txt").write_text("a b c d " * 20)
    if engine.available():
        generator()
    return folder


def damaged_description(draw: random.Random, saved: dict[str, Any]) -> dict[str, Any]:
    """A description of a wiring in which one value is another."""
    found = copy.deepcopy(saved)
    inner: Any = found
    while True:
        key = draw.choice(sorted(inner) if isinstance(inner, dict) else range(len(inner)))
        if not isinstance(inner[key], (dict, list)) or not inner[key] or draw.random() < 0.2:
            inner[key] = draw.choice(ODD)
            return found
        inner = inner[key]


def train_with(kind: str, /, **options: Any) -> None:
    """Train two steps with a rule."""
    rule, model = rules.get(kind, **options), plain()
    wiring = wirings.wire_(model, rule, **({} if rule.own_budget else {"density": 0.5}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wiring.plan(4)
    for _ in range(2):
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()
        wiring.step(optimizer)


def state_of(model: Any) -> dict[str, Tensor] | None:
    """A copy of a model's state; None for what has none."""
    if not isinstance(model, nn.Module) or any(is_lazy(parameter) for parameter in model.parameters()):
        return None
    return {name: x.clone() for name, x in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two states have the same names and values."""
    return one.keys() == other.keys() and all(
        x.is_meta or torch.allclose(x, other[name], rtol=0, atol=0, equal_nan=True) for name, x in one.items()
    )


def case(given: Path, folder: Path, seed: int) -> str:
    with warnings.catch_warnings(), contextlib.chdir(given):
        warnings.simplefilter("ignore")
        return outcome(seed)


def outcome(seed: int) -> str:
    """Make the call of a seed, and say how it ended."""
    draw = random.Random(seed)
    torch.manual_seed(0)
    name = draw.choice([*ON_MODELS, *OTHERS, "rule"])
    if name == "TokenGenerator.generate" and not engine.available():
        return "skipped"
    options: dict[str, Any] = {}
    model: Any = None
    if name == "rule":
        kind = draw.choice(rules.names())
        names = list(inspect.signature(type(rules.get(kind))).parameters)
        function = functools.partial(train_with, kind)
        options = {draw.choice(names): draw.choice(ODD)} if names else {}
    else:
        function, parameters = (ON_MODELS | OTHERS)[name]
        if name in ON_MODELS:
            model = draw.choice(MODELS)() if draw.random() < 0.3 or not parameters else sparse()
        if parameters and (name in OTHERS or draw.random() < 0.8):
            options = {draw.choice(parameters): draw.choice(ODD)}
        if name == "rewire_" and draw.random() < 0.6:
            saved, state = described(draw.choice(("free", "4x2", "2:4", "2:4, transposable")))
            model, options = plain(), {"saved": damaged_description(draw, saved), "state": state}
        if name in ON_MODELS:
            function = functools.partial(function, model)
    before = state_of(model) if name in CHANGES_NOTHING else None
    try:
        function(**options)
    except WiringError as error:
        if len(str(error)) > 2000:
            return f"{MISTAKE}: {name}: {len(str(error)):,} characters"
        changed = before is not None and not same(state_of(model) or {}, before)
        return f"{MISTAKE}: {name}: changed by {str(options)[:100]}" if changed else f"{name}: refused"
    except Exception as error:
        return f"{MISTAKE}: {name}, {str(options)[:100]}: {type(error).__name__}: {str(error)[:150]}"
    return f"{name}: worked"


FUZZERS = {"arguments": Fuzzer(prepare, case, seconds=60.0, short=150)}
