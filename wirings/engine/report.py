"""Where a compiled network's time goes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepReport:
    """One step: what is done, how, and how long it takes."""

    name: str
    """The tensor that it gives."""
    kind: str
    way: str
    """sparse, dense, or torch; empty where there is but one."""
    strips: int
    """Strips of rows that its maps are cut into."""
    mult_adds: int
    """Of weights that are not zero, for one image."""
    seconds: float

    @property
    def speed(self) -> float:
        """Multiply-adds a second."""
        return self.mult_adds / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class EngineReport:
    """A compiled network, step by step, for one image; print it for a table."""

    engine: str
    threads: int
    steps: list[StepReport]

    @property
    def seconds(self) -> float:
        """Of all steps together."""
        return sum(step.seconds for step in self.steps)

    def as_mapping(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = [("step", "kind", "way", "strips", "multiply-adds", "µs", "G/s")]
        for step in self.steps:
            strips = str(step.strips) if step.strips > 1 else ""
            rows.append((step.name[:23], step.kind, step.way, strips, *_measured(step.mult_adds, step.seconds)))
        rows.append(("all", "", "", "", *_measured(sum(step.mult_adds for step in self.steps), self.seconds)))
        lines = [f"{row[0]:24}{row[1]:>14}{row[2]:>8}{row[3]:>7}{row[4]:>15}{row[5]:>9}{row[6]:>7}" for row in rows]
        return "\n".join([*lines, f"engine {self.engine}, {self.threads} threads"])


def _measured(work: int, seconds: float) -> tuple[str, str, str]:
    speed = f"{work / seconds / 1e9:.1f}" if work and seconds > 0 else ""
    return f"{work:,}" if work else "", f"{1e6 * seconds:.1f}", speed
