"""A short run of every kind of fuzzing; `make soak` runs them for as long as one asks."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.fuzz import runner
from tests.fuzz.kinds import FUZZERS
from tests.fuzz.runner import Fuzzer
from wirings import engine

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="it limits the memory of processes as Linux does")
REFUSED = {"compact", "engine", "checkpoint", "history", "text.gz", "text.xz", "shards", "settings", "recipe", "result"}
REFUSED |= {"hub", "sweep", "benchmark", "pairs", "setting changes", "wire calls", "graphs"}
"""Kinds of which at least a third is refused."""


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("kind", FUZZERS)
def test_a_short_run(kind: str) -> None:
    if kind in ("engine", "programs", "image sizes", "lives") and not engine.available():
        pytest.skip("no C++ compiler")
    fuzzer = FUZZERS[kind]
    outcomes = runner.run(fuzzer, range(fuzzer.short))
    assert not outcomes.mistakes
    assert outcomes.cases == fuzzer.short
    if kind in REFUSED:
        refused = sum(count for outcome, count in outcomes.counts.items() if outcome.endswith("refused"))
        assert refused > fuzzer.short / 3, outcomes.counts


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
