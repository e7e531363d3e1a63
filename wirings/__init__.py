"""wirings: learn how a neural network is wired while it trains."""

from wirings import nodes, rules
from wirings.budget import ConstantSchedule, CubicSchedule, LinearSchedule
from wirings.compaction import CompactModel, compact
from wirings.edges import choose, real_edges, straight_through
from wirings.errors import WiringError
from wirings.export import load_compact
from wirings.graph import Blocks, Complete, ContinuousGraph, Dag, DiscreteGraph, Graph, Matrix, StaticGraph
from wirings.rewind import rewind_
from wirings.semi_structured import semi_structured_
from wirings.version import __version__
from wirings.wire import finalize_, unwire_, wire_
from wirings.wiring import LayerReport, Wiring

__all__ = [
    "Blocks",
    "CompactModel",
    "Complete",
    "ConstantSchedule",
    "ContinuousGraph",
    "CubicSchedule",
    "Dag",
    "DiscreteGraph",
    "Graph",
    "LayerReport",
    "LinearSchedule",
    "Matrix",
    "StaticGraph",
    "Wiring",
    "WiringError",
    "__version__",
    "choose",
    "compact",
    "finalize_",
    "load_compact",
    "nodes",
    "real_edges",
    "rewind_",
    "rules",
    "semi_structured_",
    "straight_through",
    "unwire_",
    "wire_",
]
