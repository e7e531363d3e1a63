"""wirings: learn how a neural network is wired while it trains."""

from typing import TYPE_CHECKING, Any

from wirings import rules
from wirings.budgets.budget import ConstantSchedule, CubicSchedule, LinearSchedule
from wirings.compaction import CompactModel, compact, load_compact
from wirings.compaction.semi_structured import semi_structured_
from wirings.compaction.speed_up import SpeedUp, speed_up_
from wirings.errors import WiringError
from wirings.graph import Blocks, Complete, ContinuousGraph, Dag, DiscreteGraph, Graph, Matrix, StaticGraph
from wirings.history import History, Recorder
from wirings.profiling import profile
from wirings.selection.functional import choose, real_edges, straight_through
from wirings.train.load import load
from wirings.train.ship import ShippedModel, ship
from wirings.version import __version__
from wirings.wire.adapters import merge_adapters_
from wirings.wire.finalize import finalize_, unwire_
from wirings.wire.ham import HAM
from wirings.wire.handle import Wiring
from wirings.wire.prune import prune_
from wirings.wire.report import LayerReport
from wirings.wire.rewind import rewind_
from wirings.wire.rewire import rewire_
from wirings.wire.sparse_file import load_sparse, save_sparse
from wirings.wire.wire import wire_

if TYPE_CHECKING:
    from wirings.train import hub as hub

__all__ = [
    "HAM",
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
    "ShippedModel",
    "SpeedUp",
    "StaticGraph",
    "Wiring",
    "WiringError",
    "__version__",
    "choose",
    "compact",
    "finalize_",
    "load",
    "load_compact",
    "load_sparse",
    "merge_adapters_",
    "profile",
    "prune_",
    "real_edges",
    "rewind_",
    "rewire_",
    "rules",
    "save_sparse",
    "semi_structured_",
    "ship",
    "speed_up_",
    "straight_through",
    "unwire_",
    "wire_",
]


def __getattr__(name: str) -> Any:
    """Import `wirings.hub` on first use: it needs packages that the library itself does not."""
    if name != "hub":
        raise AttributeError(f"module 'wirings' has no attribute {name!r}")
    try:
        from wirings.train import hub
    except ModuleNotFoundError as error:
        raise WiringError(f"wirings.hub needs the package {error.name}: pip install wirings[hub]") from error
    return hub
