"""Speed of the HTML page in Chromium without a graphics card: time to the first drawing, and frames per second.

python -m benchmarks.page [--out results/benchmarks/page.json]

The network is Table 1's static network with 800 computing nodes and 32,000 edges. Its weights change randomly, about as
much as in training. The page itself measures the times.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine, save
from wirings import models
from wirings.draw.html import write_page
from wirings.history import History, Recorder

RECORDS, EVERY, NOISE = 100, 78, 0.05


def history() -> History:
    """A history of Table 1's static graph whose weights change by about 5 % from record to record."""
    torch.manual_seed(0)
    graph: Any = models.get("tiny_static", rule="dnw").graph
    recorder, weight = Recorder(graph.wiring, every=EVERY), graph.all_weights()
    for i in range(1, RECORDS):
        with torch.no_grad():
            weight.add_(torch.randn_like(weight) * weight.abs().mean() * NOISE)
        recorder.step(i * EVERY, loss=2.3 / i)
        recorder.note(accuracy=100 - 90 / i)
    return recorder.history()


def measure(tries: int, seconds: float) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    film, rows = history(), []
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        sys.exit("Chromium not found. `make browser` installs it on Debian as root.")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        path = write_page(film, Path(folder) / "page.html", "table1/static-dnw")
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        version = browser.version
        for _ in range(tries):
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.goto(path.as_uri())
            page.wait_for_function("() => window.wirings && window.wirings.drawn")
            first = page.evaluate("wirings.drawn")
            page.evaluate("wirings.frames.length = 0; wirings.play(true)")
            page.wait_for_timeout(1000 * seconds)
            frames = page.evaluate("wirings.frames")
            apart = sorted(b - a for a, b in itertools.pairwise(frames))
            rows.append(
                {
                    "first_ms": first,
                    "frames_a_second": 1000 * len(apart) / (frames[-1] - frames[0]),
                    "slowest_of_20_ms": apart[int(0.95 * len(apart))],
                    "load": os.getloadavg()[0],
                }
            )
            page.close()
        browser.close()
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    return {
        "chromium": version,
        "nodes": film.structure.nodes,
        "edges": len(film.state()),
        "records": len(film),
        "swapped_a_record": float(film.births[1:].mean()),
        "page_bytes": len(write_page(film, Path(tempfile.mkdtemp()) / "page.html", "x").read_bytes()),
        "tries": rows,
        "median": medians,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    row = measure(chosen.tries, chosen.seconds)
    median = row["median"]
    print(
        f"first drawing {median['first_ms']:.0f} ms, {median['frames_a_second']:.1f} frames per second, one in 20 "
        f"takes longer than {median['slowest_of_20_ms']:.0f} ms (load {median['load']:.1f}, "
        f"{row['swapped_a_record']:.0f} edges swapped per record)"
    )
    settings = {"tries": chosen.tries, "seconds": chosen.seconds}
    save(chosen.out, {"benchmark": "page", "settings": settings, **machine("cpu"), "rows": [row]})


if __name__ == "__main__":
    main()
