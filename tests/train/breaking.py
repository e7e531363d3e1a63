"""Interrupted runs, and how runs are compared: shared by the tests of training."""

import csv
from pathlib import Path

import torch
from safetensors.torch import load_file

from wirings.train import results
from wirings.train.run.log import Log

TIMES = ("seconds",)
OF_TIME = ("started", "train_s", "wall_s", "settings", "commit", "dirty")  # a commit may be made while a test runs


class BreakError(Exception):
    pass


class Stops(Log):
    """Raises after a number of batches."""

    def __init__(self, after: int) -> None:
        self.left = after

    def batch(self, done: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise BreakError


class Heard(Log):
    """Keeps all messages."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def lines(out: Path) -> list[dict[str, str]]:
    """The lines of a run's log, without times."""
    with open(out / "log.csv") as file:
        return [{key: value for key, value in line.items() if key not in TIMES} for line in csv.DictReader(file)]


def same_runs(one: Path, other: Path) -> None:
    """Assert that two runs are equal, bit for bit."""
    for name in ("initial.safetensors", "last.safetensors", "best.safetensors"):
        a, b = load_file(one / name), load_file(other / name)
        assert a.keys() == b.keys()
        different = [key for key in a if not torch.equal(a[key], b[key])]
        assert not different
    assert lines(one) == lines(other)
    assert (one / "history.wirings").read_bytes() == (other / "history.wirings").read_bytes()
    a, b = (vars(results.read(folder / "result.json")) for folder in (one, other))
    assert {key: a[key] for key in a if key not in OF_TIME} == {key: b[key] for key in b if key not in OF_TIME}
