"""Random graphs, wirings and networks: compaction keeps their outputs, and removes everything it can."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from random_networks import graphs, networks, program_of
from soak import SOAK
from torch import Tensor, nn

from wirings import StaticGraph, WiringError
from wirings.compaction.compact import compact, shrink
from wirings.compaction.program import Program
from wirings.compaction.report import program_size


def test_random_graphs_keep_their_outputs() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=200)
    @given(graphs())
    def check(drawn: tuple[StaticGraph, Tensor]) -> None:
        graph, x = drawn
        seen.update(hard_cases(graph))
        try:
            small = compact(graph, x)
        except WiringError as error:
            no_path(error, graph, x)
            seen.update(["no path"])
            return
        seen.update(["compact"])
        other = torch.randn_like(x)
        same(small(other), graph(other))
        nothing_left(small.program)

    check()
    least = {"compact": 100, "no path": 5, "dead input": 30, "constant node": 30, "empty stage": 10, "single edge": 5}
    assert all(seen[case] >= count for case, count in least.items()), seen


def hard_cases(graph: StaticGraph) -> list[str]:
    """Properties of a wiring that are hard for compaction."""
    targets, sources = graph.sparse().indices().numpy()
    inner = np.setdiff1d(np.arange(graph.nodes), graph.inputs)
    found = []
    if len(np.setdiff1d(graph.inputs, sources)):
        found.append("dead input")
    if len(np.intersect1d(np.setdiff1d(inner, targets), sources)):
        found.append("constant node")  # without inputs, but with outputs
    levels = [graph.order[start:stop] for group in graph.groups for start, stop in group.levels]
    if any(not np.isin(level, targets).any() for level in levels[1:]):
        found.append("empty stage")
    if len(targets) == 1:
        found.append("single edge")
    return found


@settings(max_examples=200)
@given(networks())
def test_random_networks_keep_their_outputs(drawn: tuple[nn.Module, Tensor]) -> None:
    model, x = drawn
    program = program_of(model, x)
    same(program.run(x)[0], model(x))
    try:
        small = shrink(program)
    except WiringError as error:
        no_path(error, model, x)
        return
    other = torch.randn(3, *x.shape[1:], dtype=x.dtype)
    same(small.run(other)[0], model(other))
    nothing_left(small)


@pytest.mark.slow
@settings(max_examples=25 if SOAK else 12)
@given(networks())
def test_traced_networks_keep_their_outputs(drawn: tuple[nn.Module, Tensor]) -> None:
    model, x = drawn
    if not constant(model, x):
        other = torch.randn(3, *x.shape[1:], dtype=x.dtype)
        same(compact(model, x)(other), model(other))


def no_path(error: WiringError, model: nn.Module, x: Tensor) -> None:
    assert "no path of edges leads from the input" in str(error)
    assert constant(model, x)


@torch.no_grad()
def constant(model: nn.Module, x: Tensor) -> bool:
    """Whether the output is the same for other inputs, which may happen although there is a path."""
    outputs = [model(torch.randn_like(x)) for _ in range(4)]
    return all(torch.allclose(y, outputs[0], rtol=1e-12, atol=1e-12) for y in outputs)


def same(found: Tensor, expected: Tensor) -> None:
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9 * scale + 1e-12)


def nothing_left(small: Program) -> None:
    """Compacting again removes nothing more."""
    once, twice = program_size(small), program_size(shrink(small))
    assert (once.nodes, once.edges, once.mult_adds) == (twice.nodes, twice.edges, twice.mult_adds)
