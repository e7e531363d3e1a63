"""Metrics that runs are compared by: each has a name, a direction, and a way to write its values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """What a data set measures a model by."""

    name: str
    """Name in results, and of the column in logs, such as ``"bits_per_byte"``."""
    label: str
    """Name in tables, such as ``"bits per byte"``."""
    higher_is_better: bool
    of: Callable[[float, float], float]
    """The value, from the mean loss in nats and the accuracy in percent."""
    unit: str = ""
    """What follows a value, such as ``" %"``."""
    digits: int = 4
    """Decimals of a value in tables."""
    remark: Callable[[float], str] = lambda _: ""
    """What logs add to a value, such as the same in another unit."""

    def better(self, value: float, than: float) -> bool:
        """Whether one value is better than another."""
        return value > than if self.higher_is_better else value < than

    def format(self, value: float | None, std: float | None = None) -> str:
        """A value, with its standard deviation if it has one; empty for None.

        >>> ACCURACY.format(93.1), ACCURACY.format(93.1, 0.25), BITS_PER_BYTE.format(1.02741)
        ('93.10 %', '93.10 ± 0.25 %', '1.0274 bits per byte')
        """
        if value is None:
            return ""
        return self.number(value) + ("" if std is None else f" ± {self.number(std)}") + self.unit

    def number(self, value: float) -> str:
        """A value without its unit."""
        return f"{value:.{self.digits}f}"


def _perplexity(nats: float) -> str:
    return f" (perplexity {math.exp(min(nats, 700.0)):.2f})"


ACCURACY = Metric("accuracy", "accuracy", True, lambda loss, accuracy: accuracy, " %", 2)
"""Percentage of examples whose class is predicted."""
BITS_PER_BYTE = Metric("bits_per_byte", "bits per byte", False, lambda loss, _: loss / math.log(2), " bits per byte")
"""Mean negative log₂ probability of the next byte."""
NATS = Metric("nats", "loss, nats", False, lambda loss, _: loss, " nats", remark=_perplexity)
"""Mean negative logarithm of the probability of the next token, whose exponential is the perplexity."""

BLEU = Metric("bleu", "BLEU", True, lambda loss, accuracy: math.nan, " BLEU", 2)
"""How similar translations are to references, from 0 to 100; the data set measures it, since the loss does not tell."""

METRICS = {metric.name: metric for metric in (ACCURACY, BITS_PER_BYTE, NATS, BLEU)}
"""All metrics, by name."""


def metric_of(line: Mapping[str, Any]) -> Metric:
    """The metric of a run, from a line of its log: every metric but accuracy has a column of its own."""
    return next((METRICS[name] for name in line if name in METRICS and name != ACCURACY.name), ACCURACY)
