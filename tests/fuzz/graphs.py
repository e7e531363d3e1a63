"""Random neural graphs: each raises WiringError, or is built, returns the right shape and has gradients."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.runner import MISTAKE, Fuzzer
from tests.fuzz.wire_calls import ODD as ALL_ODD
from wirings import WiringError, rules
from wirings.graph import (
    ActivationNode,
    Blocks,
    ContinuousGraph,
    ConvNode,
    Dag,
    DiscreteGraph,
    Groups,
    PerStep,
    PlainNode,
    StaticGraph,
    TimeNode,
)

ODD = tuple(one for one in ALL_ODD if not callable(one))  # functions of users may raise what they like
STRUCTURES = ("free", "row", "column", "1:1", "1:2", "2:4", "1x1", "2x2", "1x3", "2x2, padded", "5x3, padded")
KINDS = {"static": StaticGraph, "discrete": DiscreteGraph, "continuous": ContinuousGraph}


def recipe(draw: random.Random, dims: int, nodes: int) -> Any:
    """A recipe of node functions for states with so many dimensions."""
    kind = draw.random()
    if kind < 0.05:
        return draw.choice(ODD)
    if kind < 0.1:
        first = draw.randint(0, nodes)
        return Groups([first, nodes - first], [recipe(draw, dims, first), recipe(draw, dims, nodes - first)])
    if kind < 0.15:
        return PerStep(recipe(draw, dims, nodes), draw.randint(0, 4))
    if kind < 0.2:
        return TimeNode(recipe(draw, dims, nodes))
    activation = draw.choice(("relu", "tanh", "gelu", None, "x", 3) if draw.random() < 0.1 else ("relu", "tanh", None))
    if dims == 0 and draw.random() < 0.98:
        return draw.choice(
            (None, PlainNode(), "plain", "activation", ActivationNode(activation, bias=draw.random() < 0.5))
        )
    parts = draw.sample(["norm", "activation", "conv"], 3)
    cut = draw.randint(0, 3)
    options: dict[str, Any] = {
        "norm": draw.choice((None, "batch", "instance")), "activation": activation, "before": parts[:cut],
        "after": parts[cut:], "kernel": draw.choice((1, 3, 5)),
        "dims": draw.choice((1, 2)) if draw.random() < 0.1 else dims,
        "stride": draw.choice((1, 1, 1, 2)), "pad": draw.random() < 0.2,
    }  # fmt: skip
    if draw.random() < 0.1:
        options[draw.choice(sorted(options))] = draw.choice(ODD)
    return ConvNode(**options)


def arguments(draw: random.Random, kind: str, dims: int) -> tuple[dict[str, Any], int]:
    """Arguments of which most are valid, and the number of nodes."""
    given: dict[str, Any] = {}
    nodes = draw.randint(2, 12)
    topology = draw.choice(
        ("blocks", "dag", "matrix") if kind == "static" else ("nodes", "nodes", "blocks", "dag", "matrix")
    )
    match topology:
        case "nodes":
            given["nodes"] = nodes
        case "blocks":
            sizes = [draw.randint(1, 4) for _ in range(draw.randint(1, 5))]
            nodes = sum(sizes)
            given["blocks"] = draw.choice(
                (sizes, Blocks(sizes, draw.choice((None, 1, 2))) if len(sizes) > 1 else sizes)
            )
        case "dag":
            given["topology"] = Dag(nodes, inputs=draw.randint(1, nodes))
        case _:
            allowed = torch.rand(nodes, nodes) < draw.choice((0.1, 0.5, 1.0))
            given["topology"] = torch.tril(allowed, -1) if kind == "static" and draw.random() < 0.9 else allowed
    for name in ("inputs", "outputs"):
        needed = topology in ("nodes", "matrix") or (name == "outputs" and topology == "dag")
        if needed or draw.random() < 0.05:
            some = draw.sample(range(nodes), draw.randint(1, min(3, nodes)))
            given[name] = draw.choice((draw.randint(1, min(3, nodes)), some))
    if draw.random() < 0.7:
        given["edges"] = draw.choice((draw.randint(1, nodes * nodes), draw.uniform(0.05, 1.0)))
        if draw.random() < 0.7:
            given["rule"] = draw.choice(rules.names())
    if draw.random() < 0.25:
        given["structure"] = structure = draw.choice(STRUCTURES)
        if ":" in structure:
            given.pop("edges", None)
    if draw.random() < 0.9:
        given["node"] = recipe(draw, dims, nodes)
        if "blocks" in given and kind == "static" and draw.random() < 0.2:
            given["node"] = [recipe(draw, dims, 2) for _ in range(draw.randint(1, 5))]
    if kind == "discrete":
        given |= {"steps": draw.choice((1, 2, 4)), "checkpoint": draw.random() < 0.1}
        given |= {name: draw.choice(("every", usual)) for name, usual in (("inflow", "first"), ("reads", "last"))}
    if kind == "continuous":
        given["solver"] = draw.choice(("dopri5", "bosh3", "euler", "midpoint", "rk4"))
        if given["solver"] in ("euler", "midpoint", "rk4") or draw.random() < 0.3:
            given["steps"] = draw.randint(1, 4)
        given |= {"adjoint": draw.random() < 0.2, "max_steps": 50, "until": draw.choice((0.5, 1.0))}
    for _ in range(draw.choice((0, 0, 0, 1, 2))):
        given[draw.choice((*given, "rule", "edges", "structure", "inputs", "outputs"))] = draw.choice(ODD)
    if isinstance(given.get("steps"), int) and given["steps"] > 1000:  # which would take as long as they say
        given["steps"] = 3
    return given, nodes


def built_and_run(draw: random.Random, kind: str, dims: int) -> str:
    """Build a graph, and compute its output and gradients. Returns what went wrong."""
    given, _ = arguments(draw, kind, dims)
    graph = KINDS[kind](**given)
    size = [draw.randint(1, 6) for _ in range(dims)]
    x = torch.randn(2, len(graph.inputs), *size)
    if kind == "discrete" and graph.inflow == "every":
        x = torch.randn(2, graph.steps or 3, len(graph.inputs), *size)
    y = graph(x)
    if not str(graph) or y.shape[0] != 2 or len(graph.outputs) not in y.shape[1:3]:
        return f"the output's shape is {tuple(y.shape)}"
    if graph.wiring is not None:
        edges = graph.wiring.layers[0].edges
        real = int(edges.count(graph.real()))
        if real != int(edges.k) or (edges.groups is not None and not edges.groups.whole(graph.real(), None)):
            return f"{real} of {int(edges.k)} {edges.unit} are real, or not whole"
    if y.requires_grad:  # not if no edge leads to the outputs
        (y / y.detach().abs().max().clamp(min=1)).square().mean().backward()  # a long time may give huge outputs
        if not all(x.grad is None or torch.isfinite(x.grad).all() for x in graph.parameters()):
            return "a gradient is not finite"
    return ""


def case(_: None, folder: Path, seed: int) -> str:
    """Build a random graph."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kind = draw.choice(sorted(KINDS))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problem = built_and_run(draw, kind, draw.choice((0, 0, 1, 2)))
    except WiringError as error:
        said = str(error)
        return f"{MISTAKE}: a long message: {said[:200]}" if len(said) > 1000 else f"{kind}: refused"
    return f"{MISTAKE}: {kind}: {problem}" if problem else f"{kind}: built and run"


FUZZERS = {"graphs": Fuzzer(lambda folder: None, case, chunk=500, short=300)}
