"""Models that are wired, trained, compiled and dropped again and again leave nothing behind."""

import gc
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from soak import SOAK
from torch import nn

import wirings
from wirings import engine

WARM_UP, LIVES = (20, 1000) if SOAK else (6, 12)
OBJECTS, BYTES = 200, 30e6
"""The growth that counts as none: of Python's objects, and of the resident memory."""


def one_life(number: int, compiles: bool) -> list[weakref.ref[object]]:
    """Wire, train, finalize and maybe compile a small network. Returns references to what was made."""
    torch.manual_seed(number)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    wiring = wirings.wire_(model, ("dnw", "rigl", "set")[number % 3], density=0.3)
    wiring.plan(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.randn(2, 3, 6, 6)
    for _ in range(3):
        optimizer.zero_grad()
        model(images).square().sum().backward()
        optimizer.step()
        wiring.step(optimizer)
    made: list[object] = [model, wiring, optimizer]
    wirings.finalize_(model)
    model(images)
    if compiles:
        made.append(engine.compile(model.eval(), images, engine="sparse", threads=2))
        made[-1](images)  # type: ignore[operator]
    return [weakref.ref(thing) for thing in made]


def resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("compiles", [False, True])
def test_nothing_is_left_behind(compiles: bool) -> None:
    made = [one for number in range(WARM_UP) for one in one_life(number, compiles)]
    gc.collect()
    objects, memory, threads = len(gc.get_objects()), resident(), threading.active_count()
    tasks = len(list(Path("/proc/self/task").iterdir()))
    for number in range(LIVES):
        made += one_life(number, compiles)
    gc.collect()
    assert not [one for one in made if one() is not None]
    del made[:]
    assert threading.active_count() == threads
    assert len(list(Path("/proc/self/task").iterdir())) == tasks
    # torch.export itself keeps the symbolic shapes of every network that it traces; the kind "lives" of tests.fuzz
    # compiles without tracing each of them.
    if not compiles:
        assert len(gc.get_objects()) - objects < OBJECTS
        assert resident() - memory < BYTES
