"""Options with which rules act within the few steps of a test."""

from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {
    "gmp": {"every": 1},
    "l1_anneal": {"every": 1},
    "rigl": {"every": 2, "end": 1.0},
    "set": {"every": 2},
    "sparse_momentum": {"every": 2},
    "top_kast": {"exploration": 0.01},
}
