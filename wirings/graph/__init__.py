"""Neural graphs: topologies, node functions; static, discrete-time and continuous-time graphs."""

from wirings.graph.base import Graph
from wirings.graph.continuous import ContinuousGraph, Effort
from wirings.graph.discrete import DiscreteGraph
from wirings.graph.functions import NodeFunction
from wirings.graph.nodes import ActivationNode, ConvNode, Groups, Node, PerStep, PlainNode, TimeNode
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
    "Matrix",
    "Node",
    "NodeFunction",
    "PerStep",
    "PlainNode",
    "StaticGraph",
    "TimeNode",
]
