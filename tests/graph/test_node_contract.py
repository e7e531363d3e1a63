"""Every registered node function fulfils the contract; so does one that is added from outside the package."""

import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from wirings import ContinuousGraph, DiscreteGraph, StaticGraph, WiringError, profile
from wirings.graph import Graph, Node, NodeFunction, nodes
from wirings.graph.nodes import base

NODES, STEPS = 5, 3
each_node = pytest.mark.parametrize("name", nodes.names())

SOURCE = '''
"""A kind of node that lives outside of the package."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from wirings.graph.nodes import Node, NodeCost, NodeFunction, register


class Gates(NodeFunction):
    counted_parameters = ("gain",)

    def __init__(self, nodes):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(nodes))

    def after(self, received, time):
        return received * torch.sigmoid(received * self.gain)

    def cost(self, part, nodes, size):
        if part == "before":
            return super().cost(part, nodes, size)
        return NodeCost(np.ones(nodes, np.int64), np.ones(nodes, np.int64), size)


@register
@dataclass(frozen=True)
class GateNode(Node):
    name: ClassVar[str] = "gate_from_outside"

    def build(self, nodes, sends=True, receives=True):
        return Gates(nodes)
'''


def recipe(name: str, count: int = NODES) -> Node:
    return base._registry[name].example(count)


def built(name: str) -> NodeFunction:
    """The functions of some nodes, with parameters that differ from their initial values."""
    torch.manual_seed(0)
    function = recipe(name).build(NODES)
    with torch.no_grad():
        for parameter in function.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return function


def state(name: str, count: int = NODES) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, count, *base._registry[name].example_state)


def graph(name: str) -> DiscreteGraph:
    torch.manual_seed(0)
    return DiscreteGraph(NODES, inputs=2, outputs=2, steps=STEPS, edges=12, node=recipe(name))


def check(name: str) -> None:
    """The whole contract, for the node function of that name."""
    check_states_and_gradients(name)
    check_rows(name)
    check_some_nodes(name)
    check_quiet(name)
    check_state_dict(name)
    check_graphs(name)
    check_profile(name)


def check_states_and_gradients(name: str) -> None:
    function, x = built(name), state(name).requires_grad_()
    sent = function.before(x, 1)
    received = function.after(x, 1)
    assert sent.shape[:2] == received.shape[:2] == x.shape[:2], "every node keeps its place"
    assert torch.equal(function.between(x, 1, 2), function.before(function.after(x, 1), 2))
    (sent.sum() + (received**2).sum()).backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    for parameter in function.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()


def check_rows(name: str) -> None:
    """`on_rows` equals the plain call, on outputs and gradients."""
    function = built(name)
    for part, times in (("before", (1,)), ("after", (1,)), ("between", (1, 2))):
        x, rows = state(name).requires_grad_(), state(name).transpose(0, 1).contiguous().requires_grad_()
        plain = getattr(function, part)(x, *times)
        stored = function.on_rows(part, rows, *times)
        assert torch.equal(stored.transpose(0, 1), plain)
        plain.square().sum().backward()
        stored.square().sum().backward()
        torch.testing.assert_close(rows.grad.transpose(0, 1), x.grad)


def check_some_nodes(name: str) -> None:
    """A function that can compute only some nodes returns the same for them as when it computes all."""
    function, x = built(name), state(name)
    if function.some_nodes:
        for part in ("before", "after"):
            some = getattr(function, part)(x[:, 1:3], 1, nodes=slice(1, 3))
            torch.testing.assert_close(some, getattr(function, part)(x, 1)[:, 1:3])


def check_quiet(name: str) -> None:
    """A quiet node sends zero if its state is zero."""
    function = built(name)
    if function.quiet:
        assert not function.before(torch.zeros_like(state(name)), 1).any()


def check_state_dict(name: str) -> None:
    function, other = built(name), recipe(name).build(NODES)
    other.load_state_dict(function.state_dict())
    x = state(name)
    for made in (other, copy.deepcopy(function)):
        assert torch.equal(made.after(x, 1), function.after(x, 1))
        assert torch.equal(made.before(x, 1), function.before(x, 1))


def check_graphs(name: str) -> None:
    """A discrete graph's shortcuts equal its steps one by one; static graphs train."""
    discrete, x = graph(name), state(name, 2)
    states = discrete.initial(x)
    for time in range(STEPS):
        states = discrete.step(states, time)
    torch.testing.assert_close(discrete(x), discrete.read(states))
    static: Graph = StaticGraph([2, NODES, 2], edges=8, node=[None, recipe(name), None])
    static(x).square().sum().backward()
    assert static.all_weights().grad.abs().sum() > 0
    if name != "per_step":
        ode = ContinuousGraph(NODES, inputs=2, outputs=2, node=recipe(name), solver="euler", steps=2)
        assert ode(x).isfinite().all()


def check_profile(name: str) -> None:
    """Costs have an entry for each node, and a profile counts every parameter once."""
    function = built(name)
    for part in ("before", "after"):
        cost = function.cost(part, NODES, state(name).shape[2:])
        assert cost.mult_adds.shape == cost.params.shape == (NODES,)
        assert cost.size == getattr(function, part)(state(name), 1).shape[2:]
    discrete = graph(name)
    counted = profile(discrete, state(name, 2)[:1])
    assert counted.notes == ()
    edges = discrete.allowed
    assert counted.all_params == edges + sum(p.numel() for p in discrete.function.parameters())
    assert counted.mult_adds <= counted.dense_mult_adds


@each_node
def test_contract(name: str) -> None:
    check(name)


@each_node
def test_available_by_name(name: str) -> None:
    kind = base._registry[name]
    assert kind.name == name
    assert isinstance(kind.example(NODES), kind)
    if name in ("groups", "per_step"):  # these have no default settings
        with pytest.raises(WiringError, match=f"Use {kind.__name__}"):
            nodes.get(name)
    else:
        assert nodes.get(name) == kind()
        x = state(name, 2)
        torch.manual_seed(0)
        named = StaticGraph([2, 4, 2], node=name)
        torch.manual_seed(0)
        assert torch.equal(named(x), StaticGraph([2, 4, 2], node=kind())(x))


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module outside of the package that registers a node, found like any other."""
    (tmp_path / "gate_from_outside.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("gate_from_outside")
    yield "gate_from_outside"
    sys.modules.pop("gate_from_outside")
    del base._registry["gate_from_outside"]


def test_a_node_from_outside_the_package(outside: str) -> None:
    assert outside in nodes.names(), "the contract tests run over these names"
    check(outside)
    model = DiscreteGraph(NODES, inputs=2, outputs=2, steps=2, node=outside)
    counted = profile(model, (2,))
    assert counted.dense_mult_adds == 2 * (NODES * NODES + NODES), "edges, and one multiply-add for each node"


def test_help_speaks_of_nodes() -> None:
    assert "recipe" in (nodes.register.__doc__ or "")
    assert "recipes" in (nodes.names.__doc__ or "")


def test_rejects_registering_twice_or_without_a_name(outside: str) -> None:
    with pytest.raises(WiringError, match="a node named 'conv' is already registered"):
        nodes.register(base._registry["conv"])

    class Nameless(Node):
        def build(self, nodes: int, sends: bool = True, receives: bool = True) -> NodeFunction:
            return NodeFunction()

    with pytest.raises(WiringError, match="Nameless has no name to register it by"):
        nodes.register(Nameless)
