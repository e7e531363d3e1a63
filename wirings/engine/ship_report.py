"""What shipping a network gained: before and after, side by side."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from wirings.compaction import CompactionReport
from wirings.engine.turns import Timing
from wirings.utils.tables import Cell, markdown_table, text_table
from wirings.utils.text import as_markdown, printable

ORIGINAL, COMPACT, ONNX, ENGINE = "PyTorch", "PyTorch, compact", "ONNX Runtime", "engine"
"""The sides that are measured: the original network, and the shipped one in several runtimes."""
MOST_KINDS = 8
"""Kinds of steps left to PyTorch that a printed report names; `ShipReport.left_to_torch` has all."""


@dataclass(frozen=True)
class ShipSide:
    """One way to run the network."""

    name: str
    timing: Timing
    difference: float
    """The largest difference from the original's outputs for the example, as a share of the largest output."""


@dataclass(frozen=True)
class ShipMetric:
    """What the network is measured by on data, before (the original in PyTorch) and after (what is shipped)."""

    label: str
    before: float
    after: float
    unit: str = ""
    digits: int = 4
    examples: int | None = None

    def format(self, value: float) -> str:
        """A value with its unit, such as ``93.10 %``."""
        return f"{value:.{self.digits}f}{self.unit}"


@dataclass(frozen=True)
class TorchSteps:
    """Steps of one kind that the engine leaves to PyTorch."""

    kind: str
    count: int
    seconds: float
    """The time of these steps together."""


@dataclass(frozen=True)
class ShipReport:
    """What shipping a network gained. Print it for a table."""

    model: str
    example: str
    """The shapes of the inputs that were measured."""
    threads: int
    machine: str
    versions: dict[str, str]
    dtype: str | None
    """What weights are rounded to in the files; what is measured is what they give when loaded again."""
    sides: list[ShipSide]
    sizes: CompactionReport
    bytes_before: int
    """Bytes of a file with the original's `state_dict`."""
    files: dict[str, int]
    """Bytes of the files of the shipped network, the compact model first."""
    metric: ShipMetric | None
    left_to_torch: list[TorchSteps]
    used: str
    """What ``ShippedModel.fast`` runs on: ``"engine"``, or ``"torch"`` if the engine gains nothing."""
    notes: list[str]
    """What was left out, and why; a sentence each."""
    quantize: str | None = None
    """What the engine computes in, if not in float32."""

    def side(self, name: str) -> ShipSide | None:
        """The side of this name, if it was measured."""
        return next((side for side in self.sides if side.name == name), None)

    @property
    def shipped(self) -> ShipSide:
        """The side that `used` names."""
        found = self.side(ENGINE if self.used == "engine" else COMPACT)
        assert found is not None
        return found

    @property
    def speedup(self) -> float:
        """How many times as fast as the original in PyTorch the shipped network is."""
        return self.sides[0].timing.median / self.shipped.timing.median

    @property
    def bytes_after(self) -> int:
        """Bytes of the file of the compact model."""
        return next(iter(self.files.values()))

    @property
    def summary(self) -> str:
        """What was gained, in a few sentences."""
        return " ".join(self._sentences())

    def _sentences(self) -> list[str]:
        original, compact, engine, onnx = (self.side(name) for name in (ORIGINAL, COMPACT, ENGINE, ONNX))
        assert original is not None
        assert compact is not None
        before, after = original.timing.median, self.shipped.timing.median
        if self.used == "engine":
            more = "" if onnx is None else f" and {_times(onnx.timing.median / after)} times as fast as ONNX Runtime"
            said = [f"The engine is {_times(self.speedup)} times as fast as the original network in PyTorch{more}."]
        elif engine is None:
            said = ["The kernels of the engine are not available on this machine, so PyTorch is used."]
        else:
            said = [
                f"The engine gains nothing here ({_ms(engine.timing.median)} ms; the compact network in PyTorch takes "
                f"{_ms(compact.timing.median)} ms), so PyTorch is used."
            ]
        if after > before:
            said.append(f"The original network is faster in PyTorch ({_ms(before)} ms): for speed, keep that one.")
        if onnx is not None and onnx.timing.median < min(before, after):
            said.append(f"ONNX Runtime is fastest ({_ms(onnx.timing.median)} ms).")
        disturbed, turns = (sum(getattr(s.timing, key) for s in self.sides) for key in ("disturbed", "turns"))
        if 5 * disturbed > turns:
            said.append(
                f"But the machine was busy in {disturbed} of {turns} turns, which slows some sides more than others: "
                "measure again on an idle one."
            )
        return said

    # ---- text -------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        lines = text_table(self._header, self._rows(), align="lrrr")
        return "\n".join([self._title(), "", *lines, "", *self._sentences(), *self._remarks()])

    def as_markdown(self) -> str:
        """The report as a page of Markdown."""
        table = markdown_table(self._header, self._rows(), align="lrrr")
        remarks = [f"- {as_markdown(line)}" for line in self._remarks()]
        titles = [f"# {as_markdown(self.model)}", "", as_markdown(self._title())]
        return "\n".join([*titles, "", *table, "", as_markdown(self.summary), "", *remarks, ""])

    _header = ("", "before", "after", "gain")

    def _title(self) -> str:
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        return f"{printable(self.model)}, input {self.example}, {threads}, {self.machine}"

    def _rows(self) -> list[list[Cell]]:
        rows: list[list[Cell]] = []
        original = self.sides[0].timing.median
        engine = "engine" if self.quantize is None else f"engine, {self.quantize}"
        for label, name in (("PyTorch", COMPACT), ("ONNX Runtime", ONNX), (engine, ENGINE)):
            if (side := self.side(name)) is not None:
                after = side.timing.median
                before = _ms(original) if name == COMPACT else ""
                rows.append([f"ms, {label}", before, _ms(after), f"{_times(original / after)} ×"])
        one, two = self.sizes.before, self.sizes.after
        kind = "" if self.dtype is None else f", {self.dtype}"
        for label, first, second in (
            (f"bytes of the file{kind}", self.bytes_before, self.bytes_after),
            ("parameters", one.parameters, two.parameters),
            ("multiply-adds", one.mult_adds, two.mult_adds),
            ("multiply-adds, with zeros", one.dense_mult_adds, two.dense_mult_adds),
        ):
            rows.append([label, first, second, f"{_times(first / second)} ×" if first and second else ""])
        if (metric := self.metric) is not None:
            values = [metric.format(value) for value in (metric.before, metric.after)]
            rows.append([metric.label, *values, f"{metric.after - metric.before:+.{metric.digits}f}"])
        rows.append(["largest difference of outputs", "", f"{self.shipped.difference:.1e}", ""])
        return rows

    def _remarks(self) -> list[str]:
        lines = [
            f"Times are medians of at least {min(side.timing.turns for side in self.sides)} turns for each side. Gains "
            "compare with the original in PyTorch.",
            "The difference is a share of the largest output.",
        ]
        if self.metric is not None and self.metric.examples is not None:
            count = self.metric.examples
            lines.append(f"Measured on {count:,} example{'' if count == 1 else 's'}: {self.metric.label}.")
        if self.left_to_torch:
            parts = [f"{p.count} × {p.kind} ({1e6 * p.seconds:,.0f} µs)" for p in self.left_to_torch]
            more = [f"and {len(parts) - MOST_KINDS} more kinds"] if len(parts) > MOST_KINDS else []
            lines.append(f"Left to PyTorch by the engine: {', '.join([*parts[:MOST_KINDS], *more])}.")
        lines.append(f"Files: {', '.join(f'{name} {size:,} bytes' for name, size in self.files.items())}.")
        return [*lines, *self.notes]

    # ---- JSON -------------------------------------------------------------------------------------------------------

    def as_mapping(self) -> dict[str, Any]:
        """The report as plain Python values, for JSON."""
        return {**dataclasses.asdict(self), "sizes": self.sizes.as_mapping()}

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> ShipReport:
        """The report from `as_mapping`."""
        metric = mapping["metric"]
        made = {
            "sides": [ShipSide(**{**side, "timing": Timing(**side["timing"])}) for side in mapping["sides"]],
            "sizes": CompactionReport.from_mapping(mapping["sizes"]),
            "metric": None if metric is None else ShipMetric(**metric),
            "left_to_torch": [TorchSteps(**steps) for steps in mapping["left_to_torch"]],
        }
        return cls(**{**mapping, **made})


def _ms(seconds: float) -> str:
    return _times(1e3 * seconds)


def _times(value: float) -> str:
    """A number with three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 else f"{value:.6f}"
