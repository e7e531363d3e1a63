"""Put the networks of finished runs into the package, or into another folder; `wirings models` lists them.

    python -m tools.bundle RUN [RUN …]       # the folder of a finished run: measures it on the run's test set
    python -m tools.bundle --update          # renew the scores of other seeds from results/

Run it where the data is. A network with its history takes at most 2 MB, and all of them together at most 12 MB.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from wirings import WiringError
from wirings.train import bundled, results
from wirings.train.bundle_run import HISTORY_LIMIT, LIMIT, bundle_run, update_scores
from wirings.train.bundled.card import CARD, read_card
from wirings.train.run.folder import RESULT

ALL_LIMIT = 12_000_000
"""The most bytes of all networks in the package."""


def size_of(folder: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folders of finished runs")
    parser.add_argument("--into", type=Path, default=bundled.FOLDER, help="folder to write to; by default, the package")
    parser.add_argument("--name", help="name of the network, if not that of the recipe; for one run")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder with results of other seeds")
    parser.add_argument("--limit", type=int, default=LIMIT, help="most bytes of a network with its history")
    parser.add_argument("--history", type=int, default=HISTORY_LIMIT, help="most bytes of a history")
    parser.add_argument("--device", help="what to measure on")
    parser.add_argument("--update", action="store_true", help="renew the scores of all cards")
    given = parser.parse_args()
    if given.name is not None and len(given.runs) != 1:
        parser.error("--name is for one RUN")
    for run in given.runs:
        recipe = results.read(run / RESULT).recipe if (run / RESULT).is_file() else ""
        folder = bundle_run(
            run,
            given.into,
            name=given.name,
            others=results.find(given.results, recipe) if recipe else [],
            limit=given.limit,
            history_limit=given.history,
            device=given.device,
        )
        card = read_card(folder)
        rounded = "" if card.dtype is None else f", rounded to {card.dtype}"
        print(f"{folder}: {size_of(folder):,} bytes{rounded}; {card.quality} stored, {card.result} in the run")
    if given.update:
        for path in sorted(given.into.glob(f"*/*/{CARD}")):
            if update_scores(path.parent, given.results):
                print(f"{path}: new scores")
    entries = sum(size_of(path.parent) for path in given.into.glob(f"*/*/{CARD}"))
    if entries > ALL_LIMIT:
        sys.exit(f"the networks in {given.into} take {entries:,} bytes, more than {ALL_LIMIT:,}")


if __name__ == "__main__":
    try:
        main()
    except WiringError as error:
        sys.exit(f"error: {error}")
