"""A short run of every kind of fuzzing; `make soak` runs them for as long as one asks."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.fuzz import foreign_files, image_sizes, programs, runner
from tests.fuzz.kinds import FUZZERS
from tests.fuzz.runner import Fuzzer
from wirings import engine

ROOT = Path(__file__).parents[2]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="it limits the memory of processes as Linux does")
REFUSED = {
    "compact",
    "bfloat16",
    "sparse bfloat16",
    "engine",
    "checkpoint",
    "history",
    "text.gz",
    "text.xz",
    "shards",
    "sizes",
    "settings",
    "recipe",
    "result",
}
REFUSED |= {name for name in foreign_files.KINDS if name != "pretrained"}
REFUSED |= {
    "hub",
    "hub structure",
    "hub sparse",
    "hub sparse weights",
    "sweep",
    "benchmark",
    "pairs",
    "setting changes",
    "wire calls",
    "arguments",
    "graphs",
}
"""Kinds of which at least a third is refused."""


PART = 2500
"""The most cases of one test, so that long runs are divided among processes."""
PARTS = [
    pytest.param(kind, range(first, min(first + PART, fuzzer.short)), id=kind if first == 0 else f"{kind}-{first}")
    for kind, fuzzer in FUZZERS.items()
    for first in range(0, fuzzer.short, PART)
]


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seeds"), PARTS)
def test_a_short_run(kind: str, seeds: range) -> None:
    if kind in ("engine", "programs", "image sizes", "lives") and not engine.available():
        pytest.skip("no C++ compiler")
    outcomes = runner.run(FUZZERS[kind], seeds)
    assert not outcomes.mistakes
    assert outcomes.cases == len(seeds)
    if kind in REFUSED:
        refused = sum(count for outcome, count in outcomes.counts.items() if outcome.endswith("refused"))
        assert refused > len(seeds) / 3, outcomes.counts


def test_huge_images_are_drawn_but_not_in_the_short_run() -> None:
    huge = [seed for seed in range(5000) if image_sizes.is_huge(seed)]
    assert 100 < len(huge) < 200
    assert min(huge) >= FUZZERS["image sizes"].short


def test_outputs_are_not_right_because_of_nan() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    nan, infinite = torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([1.0, float("inf"), 3.0])
    for wrong in (nan, infinite, x.new_full((3,), float("nan"))):
        assert programs.difference(wrong, (x,)) == programs.difference(x, (wrong,)) == float("inf")
    assert programs.difference(nan, (nan,)) == programs.difference(infinite, (infinite,)) == 0
    assert programs.difference(nan * 2, (nan,)) == 1


def misbehave(given: str, folder: Path, seed: int) -> str:
    assert given == "shared"
    match seed:
        case 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case 3:
            time.sleep(60)
        case 4:
            raise ValueError("what")
        case 5:
            return "x" * len(bytearray(2**31))
    return "fine"


@LINUX
def test_bugs_are_counted_once_and_do_not_stop_the_run() -> None:
    fuzzer = Fuzzer(lambda folder: "shared", misbehave, memory=2**29, chunk=4, seconds=2)
    outcomes = runner.run(fuzzer, range(8))
    assert outcomes.counts == {"fine": 4, runner.MISTAKE: 4}
    assert outcomes.mistakes == [
        "seed 1: crashed, exit status -9",
        "seed 3: took more than 2 s",
        "seed 4: ValueError: what",
        "seed 5: MemoryError: ",
    ]
    assert runner.run(fuzzer, range(6, 10**9), minutes=0.001).mistakes == []


def take_a_moment(given: str, folder: Path, seed: int) -> str:
    time.sleep(0.05)
    return "fine"


@LINUX
@pytest.mark.parametrize("minutes", [-1.0, 0.0, 0.002])
def test_every_kind_gets_a_turn(minutes: float) -> None:
    outcomes = runner.run(Fuzzer(lambda folder: "", take_a_moment, chunk=1000), range(1000), minutes)
    assert 1 <= outcomes.cases <= (1 if minutes <= 0 else 5)
    assert not outcomes.mistakes


@pytest.mark.parametrize("minutes", ["1", "2", "7", "10", "60"])
def test_soak_divides_its_time(minutes: str) -> None:
    words = ["make", "--dry-run", "soak", f"MINUTES={minutes}", "VENV=none"]
    lines = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.replace("\\\n", " ")
    (sanitizers,) = re.findall(r"tests\.sanitize .*--minutes (.*)$", lines, re.MULTILINE)
    (fuzzers,) = re.findall(r"tests\.fuzz .*--minutes (.*)$", lines, re.MULTILINE)
    said = subprocess.run(["sh", "-c", f"echo {sanitizers} {fuzzers}"], capture_output=True, text=True, check=True)
    shares = [float(share) for share in said.stdout.split()]
    assert shares == [pytest.approx(0.1 * float(minutes)), pytest.approx(0.9 * float(minutes))]
