"""Neural graphs: static, discrete-time and continuous-time ones, their topologies and their node functions."""

from wirings.graph.base import Graph
from wirings.graph.continuous import ContinuousGraph, Effort
from wirings.graph.discrete import DiscreteGraph
from wirings.graph.liveness import Liveness
from wirings.graph.nodes import (
    ActivationNode,
    ConvNode,
    Groups,
    Node,
    NodeCost,
    NodeFunction,
    PerStep,
    PlainNode,
    TimeNode,
)
from wirings.graph.static import StaticGraph
from wirings.graph.topology import Blocks, Complete, Dag, Matrix

__all__ = [
    "ActivationNode",
    "Blocks",
    "Complete",
    "ContinuousGraph",
    "ConvNode",
    "Dag",
    "DiscreteGraph",
    "Effort",
    "Graph",
    "Groups",
    "Liveness",
    "Matrix",
    "Node",
    "NodeCost",
    "NodeFunction",
    "PerStep",
    "PlainNode",
    "StaticGraph",
    "TimeNode",
]
