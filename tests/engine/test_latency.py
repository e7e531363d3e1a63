"""The latency benchmark: its networks have the stated cost, and it keeps a record."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from soak import SOAK

from benchmarks import latency
from wirings import engine
from wirings.profiling import profile

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")


@pytest.mark.slow
@pytest.mark.skipif(not SOAK, reason="counting the large network takes long; WIRINGS_SOAK=1 asks for it")
def test_random_network_has_the_cost_of_the_papers() -> None:
    model, about = latency.dnw()
    counted = profile(model, (3, latency.PIXELS, latency.PIXELS))
    assert counted.mult_adds == about["mult_adds"]
    assert abs(about["mult_adds"] / 42.1e6 - 1) < 0.02
    assert counted.live_params < 0.6 * counted.all_params  # many nodes are dead, as in trained networks


@pytest.mark.slow
def test_parts_are_added_to_the_record(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    out.write_text(json.dumps({"benchmark": "latency", "mobilenet": {"kept": True}}))
    command = [sys.executable, "-m", "benchmarks.latency", "density", "--seconds=0.05", "--threads=1", f"--out={out}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["mobilenet"] == {"kept": True}
    found = record["density"]
    assert {"hardware", "versions", "commit", "date"} <= found.keys()
    assert len(found["rows"]) == len(latency.LAYERS) * len(latency.DENSITIES)
    assert all(row["sparse_s"] > 0 and row["dense_s"] > 0 for row in found["rows"])


def test_both_sides_alternate() -> None:
    calls: list[str] = []

    def side(name: str, seconds: float) -> None:
        calls.append(name)
        time.sleep(seconds)

    found = latency.in_turn({"a": lambda: side("a", 0.002), "b": lambda: side("b", 0.006)}, seconds=0.5)
    first_of_b = calls.index("b")
    assert "a" in calls[first_of_b:]  # not all of one side first
    assert found["a"]["n"] >= 5
    assert 0.002 <= found["a"]["min_s"] <= found["a"]["median_s"] < found["b"]["median_s"]
