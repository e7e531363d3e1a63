"""Format the numbers of tables; None becomes an empty string."""

from __future__ import annotations


def with_std(mean: float | None, std: float | None, digits: int) -> str:
    """A percentage, with its standard deviation if it has one.

    >>> with_std(89.75, 0.21, 1), with_std(89.75, None, 2), with_std(None, None, 1)
    ('89.8 ± 0.2 %', '89.75 %', '')
    """
    if mean is None:
        return ""
    return f"{mean:.{digits}f} %" if std is None else f"{mean:.{digits}f} ± {std:.{digits}f} %"


def with_commas(value: float | None) -> str:
    """A number rounded to an integer, with thousands separators."""
    return "" if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """A duration in seconds, minutes or hours.

    >>> duration(42), duration(600), duration(7200)
    ('42 s', '10 min', '2.0 h')
    """
    if seconds is None:
        return ""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


AT_MOST_NOTE = (
    "Training is the time of the training steps, of runs that were alone on their GPU. ≤: it is not known whether they "
    "were, so that a run alone takes at most as long."
)


def time_cell(seconds: float | None, alone: bool) -> str:
    """A duration, marked if the runs that it was measured on may have shared their GPU.

    >>> time_cell(42, True), time_cell(600, False), time_cell(None, False)
    ('42 s', '≤ 10 min', '')
    """
    return duration(seconds) if alone or seconds is None else f"≤ {duration(seconds)}"


def millions(value: float | None, like: float | None = None) -> str:
    """A number in millions, with three digits, or with as many decimals as ``like`` has in the paper.

    >>> millions(55_646_946, 41e6), millions(55_646_946, 55.7e6), millions(469_072), millions(0.24e6)
    ('56M', '55.6M', '0.469M', '0.24M')
    """
    if value is None:
        return ""
    if like is None:
        return f"{value / 1e6:.3g}M"
    decimals = len(f"{like / 1e6:g}".partition(".")[2])
    return f"{value / 1e6:.{decimals}f}M"
