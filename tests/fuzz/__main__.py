"""Fuzz the library: ``python -m tests.fuzz --kind history --cases 10000``, or ``--minutes 10`` for all kinds in turn.

Each kind gets an equal part of the time that is left, and at least one case.

Every case has a number, its seed, so a bug is found again with ``--seed NUMBER --cases 1``.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.fuzz import records
from tests.fuzz.kinds import FUZZERS
from tests.fuzz.runner import Outcomes, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--kind", choices=("all", *FUZZERS), default="all", help="what to try")
    parser.add_argument("--cases", type=int, default=1000, help="how many cases of each kind")
    parser.add_argument("--seed", type=int, default=0, help="the first case")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time for all kinds together")
    parser.add_argument("--record", type=Path, help="folder to write a record of each kind to, as JSON")
    given = parser.parse_args()
    names = list(FUZZERS) if given.kind == "all" else [given.kind]
    began, found = time.monotonic(), 0
    for number, name in enumerate(names):
        left = given.minutes - (time.monotonic() - began) / 60
        saved = [0.0]

        def progress(outcomes: Outcomes, name: str = name, saved: list[float] = saved) -> None:
            if given.record is not None and time.monotonic() - saved[0] > 20:
                records.save(given.record, name, given.seed, outcomes)
                saved[0] = time.monotonic()

        seeds = range(given.seed, given.seed + given.cases)
        outcomes = run(FUZZERS[name], seeds, left / (len(names) - number), progress)
        if given.record is not None:
            records.save(given.record, name, given.seed, outcomes)
        print(f"{name}: {outcomes}", *outcomes.mistakes, sep="\n  ", flush=True)
        found += outcomes.found
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
