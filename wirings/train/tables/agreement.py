"""Whether a measured mean and the paper's agree, and which rows have too few seeds to say much."""

from __future__ import annotations

import math

PAPER_RUNS = 5
"""The runs of every row for which the paper reports a standard deviation."""
CLOSE = 2.0
"""Standard errors within which two means agree."""
ENOUGH = 3
"""Rows with fewer seeds are marked in every table."""
MARK = "†"
FEW_NOTE = f"{MARK}: fewer than three seeds."
NOTE = (
    "Differences are measured minus paper, in percentage points and, in brackets, in standard errors (se): the "
    "difference over √(s²/n + σ²/5), with the standard deviation s of our n runs and σ of the paper's 5. The two agree "
    "if they are within 2 se. One run has no deviation."
)


def in_standard_errors(
    mean: float | None, std: float | None, runs: int, paper: float | None, paper_std: float | None
) -> float | None:
    """The difference of two means, in standard errors of that difference; None if either has no deviation.

    >>> round(in_standard_errors(80.0, 0.4, 4, 81.0, 0.6), 2)
    -2.99
    >>> in_standard_errors(80.0, None, 1, 81.0, 0.6) is None
    True
    """
    if mean is None or std is None or paper is None or paper_std is None:
        return None
    error = math.sqrt(std**2 / runs + paper_std**2 / PAPER_RUNS)
    return (mean - paper) / error if error > 0 else None


def agreement(last: float | None, best: float | None) -> str:
    """Which of the two epochs agree with the paper, by their differences in standard errors.

    >>> agreement(-0.5, 1.0), agreement(-2.5, 1.0), agreement(2.5, 3.0), agreement(None, None)
    ('both', 'best', 'neither', '')
    """
    if last is None and best is None:
        return ""
    agree = [name for name, errors in (("last", last), ("best", best)) if errors is not None and abs(errors) <= CLOSE]
    return "both" if len(agree) == 2 else agree[0] if agree else "neither"


def seeds_cell(seeds: int) -> str:
    """The number of seeds, marked if it is small.

    >>> seeds_cell(5), seeds_cell(2), seeds_cell(0)
    ('5', '2†', '0')
    """
    return f"{seeds}{MARK}" if 0 < seeds < ENOUGH else str(seeds)


def difference_cell(difference: float | None, errors: float | None) -> str:
    """A difference in percentage points, with its standard errors if they are known.

    >>> difference_cell(-0.85, -2.4), difference_cell(0.5, None), difference_cell(None, None)
    ('-0.85 (-2.4 se)', '+0.50', '')
    """
    if difference is None:
        return ""
    return f"{difference:+.2f}" + ("" if errors is None else f" ({errors:+.1f} se)")
