"""Checks of rules' settings: what was expected, what came."""

import numbers
from typing import Any

from wirings.errors import WiringError


def whole_number(where: str, what: str, value: Any) -> int:
    """``value``, checked to be a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise WiringError(f"{where}: {what} must be a whole number, at least 1, not {value!r}.")
    return int(value)


def number(where: str, what: str, value: Any, least: float = 0.0, most: float = 1.0, hint: str = "") -> float:
    """``value``, checked to be a number from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not least <= float(value) <= most:
        raise WiringError(f"{where}: {what} must be a number from {least:g} to {most:g}, not {value!r}.{hint}")
    return float(value)
