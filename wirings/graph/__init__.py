"""Neural graphs: topologies, node functions; static, discrete-time and continuous-time graphs."""

from wirings.graph.base import Graph
from wirings.graph.continuous import ContinuousGraph, Effort
from wirings.graph.discrete import DiscreteGraph
from wirings.graph.static import StaticGraph
from wirings.graph.topology import Blocks, Complete, Dag, Matrix

__all__ = [
    "Blocks",
    "Complete",
    "ContinuousGraph",
    "Dag",
    "DiscreteGraph",
    "Effort",
    "Graph",
    "Matrix",
    "StaticGraph",
]
