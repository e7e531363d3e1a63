"""Checks of the options that transformers share."""

from __future__ import annotations

from collections.abc import Mapping

from wirings.errors import WiringError
from wirings.utils.checks import check_int, is_number


def check_transformer_options(model: str, rates: Mapping[str, float], *, width: int, heads: int, **sizes: int) -> None:
    """Raise a `WiringError` for sizes and probabilities that no transformer can have.

    Args:
        model: Name of the model, for messages.
        rates: Probabilities with which something is dropped, by their names.
        width: Size of a token's state, which must be a multiple of ``heads``.
        heads: Number of attention heads.
        sizes: Other sizes by their names, whole numbers of at least 1.

    >>> check_transformer_options("gpt", {"dropout": 0.1}, width=6, heads=4)
    Traceback (most recent call last):
    wirings.errors.WiringError: gpt: width must be a multiple of heads, got width = 6 and heads = 4.
    """
    for name, size in {**sizes, "heads": heads, "width": width}.items():
        check_int(model, name, size)
    if width % heads:
        raise WiringError(f"{model}: width must be a multiple of heads, got width = {width} and heads = {heads}.")
    for name, rate in rates.items():
        if not is_number(rate) or not 0 <= rate < 1:
            raise WiringError(f"{model}: {name} must be a number of at least 0 and below 1, got {rate!r}.")
