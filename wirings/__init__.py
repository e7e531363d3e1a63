"""wirings: learn how a neural network is wired while it trains."""

from wirings import rules
from wirings.budget import ConstantSchedule, CubicSchedule, LinearSchedule
from wirings.edges import choose, real_edges, straight_through
from wirings.errors import WiringError
from wirings.version import __version__
from wirings.wire import finalize_, unwire_, wire_
from wirings.wiring import LayerReport, Wiring

__all__ = [
    "ConstantSchedule",
    "CubicSchedule",
    "LayerReport",
    "LinearSchedule",
    "Wiring",
    "WiringError",
    "__version__",
    "choose",
    "finalize_",
    "real_edges",
    "rules",
    "straight_through",
    "unwire_",
    "wire_",
]
