"""Checks of numbers and flags given by users. All raise `WiringError` with what was expected and what was given.

Booleans are never accepted as numbers. NumPy's scalars are accepted wherever Python's are.
"""

import math
import numbers
import sys
from typing import Any, TypeGuard

from wirings.errors import WiringError
from wirings.utils.text import brief


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number by its type (2.0 is not)."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number by its type; it may be infinite or NaN."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_finite(value: float, most: float = sys.float_info.max) -> bool:
    """Whether a number can be a finite float, of magnitude at most ``most``; Python's integers can be larger."""
    return -most <= value <= most


def check_int(where: str, what: str, value: Any, least: int = 1, most: int | None = None, hint: str = "") -> int:
    """Return ``value`` as an int if it is a whole number from ``least`` to ``most``.

    Args:
        where: what the message begins with, such as a rule's or a class's name.
        what: the name of the argument.
        value: the value to check.
        least: the smallest number that is accepted.
        most: the largest number that is accepted, or None for no limit.
        hint: appended to the message, with a space before it.
    """
    if not is_int(value) or value < least or (most is not None and value > most):
        span = f", at least {least}," if most is None else f" from {least} to {most},"
        raise WiringError(f"{where}: {what} must be a whole number{span} got {brief(value)}.{hint}")
    return int(value)


def check_number(
    where: str, what: str, value: Any, least: float = 0.0, most: float = 1.0, hint: str = "", above: bool = False
) -> float:
    """Return ``value`` as a float if it is a finite number from ``least`` to ``most``.

    Args:
        where: what the message begins with, such as a rule's or a class's name.
        what: the name of the argument.
        value: the value to check.
        least: the smallest number that is accepted.
        most: the largest number that is accepted; ``math.inf`` for no limit.
        hint: appended to the message, with a space before it.
        above: whether ``least`` itself is excluded.
    """
    inside = is_number(value) and is_finite(value) and least <= value <= most
    if not inside or (above and value == least):
        if above:
            span = f"above {least:g}" + (f" and at most {most:g}" if math.isfinite(most) else "")
        else:
            span = f"from {least:g} to {most:g}" if math.isfinite(most) else f"of at least {least:g}"
        raise WiringError(f"{where}: {what} must be a number {span}, got {brief(value)}.{hint}")
    return float(value)


def check_bool(where: str, what: str, value: Any) -> bool:
    """Return ``value`` if it is True or False."""
    if not isinstance(value, bool):
        raise WiringError(f"{where}: {what} must be true or false, got {brief(value)}.")
    return value


def check_seed(where: str, value: Any) -> int | None:
    """Return ``value`` if it is a seed that PyTorch accepts, or None for one drawn from PyTorch's generator."""
    if value is None:
        return None
    if not is_int(value) or not -(2**63) <= value < 2**64:
        raise WiringError(f"{where}: seed must be a whole number, or left out, got {brief(value)}.")
    return int(value)
