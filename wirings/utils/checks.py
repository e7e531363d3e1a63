"""Checks of rules' settings: what was expected, what came."""

import math
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
    real = not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)
    if not real or not least <= float(value) <= most:
        upper = f"from {least:g} to {most:g}" if math.isfinite(most) else f"of at least {least:g}"
        raise WiringError(f"{where}: {what} must be a number {upper}, not {value!r}.{hint}")
    return float(value)


def yes_or_no(where: str, what: str, value: Any) -> bool:
    """``value``, checked to be one of the two."""
    if not isinstance(value, bool):
        raise WiringError(f"{where}: {what} must be true or false, not {value!r}.")
    return value


def seed_or_none(where: str, value: Any) -> int | None:
    """``value``, checked to be a seed, or None for one of PyTorch's generator."""
    if value is None:
        return None
    whole = not isinstance(value, bool) and isinstance(value, numbers.Integral)
    if not whole or not -(2**63) <= int(value) < 2**64:  # what PyTorch takes
        raise WiringError(f"{where}: seed must be a whole number, or left out, not {value!r}.")
    return int(value)
