"""Runs seeded cases in processes with bounded time and memory, and counts their outcomes."""

from __future__ import annotations

import collections
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

MISTAKE = "MISTAKE"
"""How the outcome of a case begins that shows a bug."""
OUT_OF_TIME = "out of time"
"""What a process says instead of the outcome of a case that it does not try any more."""
SECONDS = 20.0
"""The time limit of one case, on a busy machine."""
MEMORY_DISK = Path("/dev/shm")
"""Where cases write their files, if it exists: they are many and small."""
SHOWN = 20
"""The number of mistakes that are kept in full."""


@dataclass(frozen=True)
class Fuzzer:
    """What is tried.

    Args:
        prepare: makes what all cases share, given an empty folder; called once, before processes are forked.
        case: tries a seed, given what ``prepare`` returned and the folder, and returns the outcome. One that begins
            with `MISTAKE` is a bug, and so are exceptions, crashes, and cases that take too long.
        memory: bytes that a process may take beyond those of one with PyTorch.
        chunk: the number of cases for each process.
        seconds: the time limit of one case.
        short: the number of cases in the test suite.
    """

    prepare: Callable[[Path], Any]
    case: Callable[[Any, Path, int], str]
    memory: int = 3 * 2**30
    chunk: int = 100
    seconds: float = SECONDS
    short: int = 100


@dataclass
class Outcomes:
    """How cases ended."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    mistakes: list[str] = field(default_factory=list)
    """The first few bugs, each with its seed."""
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        return self.counts.total()

    @property
    def found(self) -> int:
        """The number of bugs."""
        return self.counts[MISTAKE]

    def add(self, seed: int, outcome: str) -> None:
        if not outcome.startswith(MISTAKE):
            self.counts[outcome] += 1
            return
        self.counts[MISTAKE] += 1
        if len(self.mistakes) < SHOWN:
            self.mistakes.append(f"seed {seed}: {outcome.removeprefix(MISTAKE).lstrip(': ')}")

    def __str__(self) -> str:
        parts = [f"{count:,} {outcome}" for outcome, count in sorted(self.counts.items())]
        return f"{self.cases:,} cases in {self.seconds:.0f} s: {', '.join(parts)}"


def run(
    fuzzer: Fuzzer,
    seeds: range,
    minutes: float = float("inf"),
    progress: Callable[[Outcomes], None] = lambda outcomes: None,
) -> Outcomes:
    """Try the cases of some seeds in order, and call ``progress`` after each chunk.

    Args:
        fuzzer: what is tried.
        seeds: the numbers of the cases.
        minutes: when to stop before the end of ``seeds``. The first case is always tried.
        progress: called with the outcomes so far.
    """
    outcomes, began = Outcomes(), time.monotonic()
    deadline = began + 60 * minutes
    context = multiprocessing.get_context("fork")  # the shared objects need not be pickled
    with tempfile.TemporaryDirectory(dir=MEMORY_DISK if MEMORY_DISK.is_dir() else None) as made:
        folder = Path(made)
        given = fuzzer.prepare(folder)
        next_seed = seeds.start
        while next_seed < seeds.stop and (not outcomes.cases or time.monotonic() < deadline):
            chunk = range(next_seed, min(next_seed + fuzzer.chunk, seeds.stop))
            receiver, sender = context.Pipe(duplex=False)
            worker = context.Process(target=_work, args=(fuzzer, given, folder, chunk, deadline, sender))
            worker.start()
            sender.close()  # so that the end of the process is noticed
            for seed in chunk:
                outcome, ended = _outcome(receiver, worker, fuzzer.seconds)
                if outcome == OUT_OF_TIME:
                    break
                outcomes.add(seed, outcome)
                next_seed = seed + 1
                if ended:  # another process goes on after this case
                    break
            receiver.close()
            worker.join()
            outcomes.seconds = time.monotonic() - began
            progress(outcomes)
    return outcomes


def _outcome(receiver: Any, worker: Any, seconds: float) -> tuple[str, bool]:
    """The outcome of the next case, and whether it ended the process."""
    try:
        if receiver.poll(seconds):
            return str(receiver.recv()), False
        worker.kill()
        worker.join()
        return f"{MISTAKE}: took more than {seconds:g} s", True
    except EOFError:
        worker.join()
        return f"{MISTAKE}: crashed, exit status {worker.exitcode}", True


def _work(fuzzer: Fuzzer, given: Any, folder: Path, seeds: range, deadline: float, sender: Any) -> None:
    torch.set_num_threads(1)
    limit_memory(fuzzer.memory)
    for seed in seeds:
        if seed > seeds.start and time.monotonic() > deadline:
            sender.send(OUT_OF_TIME)
            return
        try:
            outcome = fuzzer.case(given, folder, seed)
        except BaseException as error:
            outcome = f"{MISTAKE}: {type(error).__name__}: {str(error)[:300]}"
        sender.send(outcome)


def limit_memory(more: int) -> None:
    """Limit this process to so many more bytes. Not under AddressSanitizer, which reserves terabytes."""
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
