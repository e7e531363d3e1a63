"""Node functions: what the nodes of a graph do with what they receive and send. One file for each kind.

A graph's ``node=`` is a recipe, from which it makes the functions of all its nodes:

- a recipe of this package, such as `ConvNode`, or its registered name, such as ``"conv"``;
- a `NodeFunction` class of your own;
- any function that takes a number of nodes and returns a module, which then acts after the edges.

To add a kind: write a `NodeFunction`, a `Node` that builds it, and decorate the latter with `register`. The contract
tests run over all registered kinds.
"""

from wirings.graph.nodes.activation import ACTIVATIONS, ActivationNode, Activations, get_activation
from wirings.graph.nodes.base import (
    After,
    Node,
    NodeCost,
    NodeFunction,
    NodeRecipe,
    get,
    names,
    register,
)
from wirings.graph.nodes.build import build
from wirings.graph.nodes.conv import ConvNode, Convolutions
from wirings.graph.nodes.groups import Grouped, Groups
from wirings.graph.nodes.plain import Plain, PlainNode
from wirings.graph.nodes.time import PerStep, Stepwise, Timed, TimeNode

__all__ = [
    "ACTIVATIONS",
    "ActivationNode",
    "Activations",
    "After",
    "ConvNode",
    "Convolutions",
    "Grouped",
    "Groups",
    "Node",
    "NodeCost",
    "NodeFunction",
    "NodeRecipe",
    "PerStep",
    "Plain",
    "PlainNode",
    "Stepwise",
    "TimeNode",
    "Timed",
    "build",
    "get",
    "get_activation",
    "names",
    "register",
]
