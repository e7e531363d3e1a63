"""Records of what was tried, in ``results/reliability``, from which the tables of docs/reliability.md are made."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from benchmarks.common import machine
from tests.fuzz.runner import Outcomes
from wirings.train.results import environment


def save(folder: Path, name: str, first: int, outcomes: Outcomes, **more: Any) -> Path:
    """Write the record of one kind of case."""
    about = environment("cpu")
    record = {
        "kind": name,
        "cases": outcomes.cases,
        "first_seed": first,
        "mistakes": outcomes.found,
        "outcomes": dict(sorted(outcomes.counts.items())),
        "shown": outcomes.mistakes,
        "seconds": round(outcomes.seconds, 1),
        "hardware": about["hardware"],
        "versions": about["versions"],
        "commit": machine("cpu")["commit"],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **more,
    }
    return write(folder, name, record)


def write(folder: Path, name: str, record: dict[str, Any]) -> Path:
    """Write any record, atomically, so that a long run can be watched."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace(' ', '_')}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
    return path
