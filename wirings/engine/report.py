"""How much time each step of a compiled network takes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from wirings.utils.tables import text_table


@dataclass(frozen=True)
class StepReport:
    """One step: what it computes, how, and how long it takes."""

    name: str
    """The tensor that it computes."""
    kind: str
    way: str
    """``sparse``, ``dense`` or ``torch``, with ``tiled`` for narrow tiles and ``bf16`` for weights in bfloat16.

    Empty if there is no choice.
    """
    strips: int
    """The number of strips of rows that its maps are cut into."""
    mult_adds: int
    """Multiply-adds with nonzero weights, for one image."""
    seconds: float

    @property
    def speed(self) -> float:
        """Multiply-adds per second."""
        return self.mult_adds / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class EngineReport:
    """The steps of a compiled network, with times for one image. Print it for a table."""

    engine: str
    threads: int
    steps: list[StepReport]
    against_torch: tuple[float, float] | None = None
    """Seconds of the whole network in the kernels and in PyTorch, if they were compared."""
    uses_torch: bool = False
    """Whether PyTorch was faster, so that it runs the network instead of the steps."""
    floats: dict[str, str] = field(default_factory=dict)
    """In a network in int8 or bfloat16, the layers that stay in float32, and why."""

    @property
    def seconds(self) -> float:
        """The time of all steps together."""
        return sum(step.seconds for step in self.steps)

    def as_mapping(self) -> dict[str, Any]:
        """The report as plain Python values, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = []
        for step in self.steps:
            strips = step.strips if step.strips > 1 else None
            rows.append([step.name[:23], step.kind, step.way, strips, *_measured(step.mult_adds, step.seconds)])
        total = ["total", "", "", None, *_measured(sum(step.mult_adds for step in self.steps), self.seconds)]
        header = ["step", "kind", "way", "strips", "multiply-adds", "µs", "G/s"]
        lines = text_table(header, rows, align="lllrrrr", footer=[total])
        lines.append(f"engine {self.engine}, {self.threads} threads")
        if self.against_torch is not None:
            own, other = (f"{1e3 * seconds:.3g} ms" for seconds in self.against_torch)
            lines.append(f"the whole network: {own}, in PyTorch {other}{', which is used' if self.uses_torch else ''}")
        reasons: dict[str, list[str]] = {}
        for name, why in self.floats.items():
            reasons.setdefault(why, []).append(name)
        lines += [f"in float32, {why}: {', '.join(names)}" for why, names in reasons.items()]
        return "\n".join(lines)


def _measured(work: int, seconds: float) -> tuple[int | None, str, str]:
    speed = f"{work / seconds / 1e9:.1f}" if work and seconds > 0 else ""
    return work or None, f"{1e6 * seconds:.1f}", speed
