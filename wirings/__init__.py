"""wirings: learn how a neural network is wired while it trains."""

from wirings import rules
from wirings.budgets.budget import ConstantSchedule, CubicSchedule, LinearSchedule
from wirings.compaction import CompactModel, compact, load_compact
from wirings.compaction.semi_structured import semi_structured_
from wirings.errors import WiringError
from wirings.graph import Blocks, Complete, ContinuousGraph, Dag, DiscreteGraph, Graph, Matrix, StaticGraph
from wirings.history import History, Recorder
from wirings.profiling import profile
from wirings.selection.functional import choose, real_edges, straight_through
from wirings.version import __version__
from wirings.wire.finalize import finalize_, unwire_
from wirings.wire.handle import Wiring
from wirings.wire.report import LayerReport
from wirings.wire.rewind import rewind_
from wirings.wire.wire import wire_

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
    "History",
    "LayerReport",
    "LinearSchedule",
    "Matrix",
    "Recorder",
    "StaticGraph",
    "Wiring",
    "WiringError",
    "__version__",
    "choose",
    "compact",
    "finalize_",
    "load_compact",
    "profile",
    "real_edges",
    "rewind_",
    "rules",
    "semi_structured_",
    "straight_through",
    "unwire_",
    "wire_",
]
