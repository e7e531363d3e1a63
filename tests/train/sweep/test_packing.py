"""The search for the number of runs that share a GPU, on a simulated GPU with a known speed for each number."""

import random
from collections.abc import Callable, Sequence

import pytest

from wirings.train.run.heartbeat import Beat
from wirings.train.sweep.packing import Memory, ObservedRun, Packing

START = 8.0
"""Seconds that a simulated run takes before its first step."""


class SimulatedRun:
    """A run with ``steps`` to make, whose steps take ``cost`` times as long as those of others."""

    def __init__(self, network: str = "net", steps: int = 100_000, cost: float = 1.0, recipe: str = "") -> None:
        self.network, self.left, self.cost, self.recipe = network, float(steps), cost, recipe or network
        self.age, self.done = 0.0, 0.0

    def beat(self, now: float) -> Beat | None:
        return Beat(now, int(self.done), int(self.done) // 50) if self.done else None


class SimulatedGpu:
    """A GPU on which n runs together make ``speed(n)`` times the steps of one, in a sweep of the given runs."""

    def __init__(self, speed: Callable[[int], float], runs: Sequence[SimulatedRun], **more: float) -> None:
        self.speed, self.waiting, self.now = speed, list(runs), 0.0
        self.running: dict[str, SimulatedRun] = {}
        self.size, self.each, self.noise = more.get("size", 100.0), more.get("each", 1.0), more.get("noise", 0.0)
        self.random = random.Random(0)
        self.packing = Packing(lambda: [Memory("GPU memory", 5 + self.each * len(self.running), self.size)])
        self.said: list[str] = []
        self.most = 0

    def second(self) -> None:
        self.now += 1
        while self.waiting and len(self.running) < self.packing.limit:
            self.running[f"run {len(self.waiting)}"] = self.waiting.pop(0)
        self.most = max(self.most, len(self.running))
        training = [run for run in self.running.values() if run.age >= START]
        for run in self.running.values():
            run.age += 1
        for run in training:
            luck = 1 + self.noise * self.random.uniform(-1, 1)
            run.done += 100 * luck * self.speed(len(training)) / len(training) / run.cost
        self.running = {name: run for name, run in self.running.items() if run.done < run.left}
        observed = {
            name: ObservedRun(run.network, run.recipe, run.beat(self.now)) for name, run in self.running.items()
        }
        if said := self.packing.observe(observed):
            self.said.append(said)

    def train(self, seconds: int = 1000) -> int:
        for _ in range(seconds):
            self.second()
        return self.packing.limit


CURVES = {
    "no gain": (lambda n: 1.0, 1),
    "no gain, then a loss": (lambda n: 1 - 0.1 * (n - 1), 1),
    "a peak at 3": (lambda n: {1: 1.0, 2: 1.5, 3: 1.7}.get(n, 1.4), 3),
    "a plateau from 4": (lambda n: min(n, 4) * 0.6, 4),
    "less than 3 % from the fifth on": (lambda n: [0, 1, 1.4, 1.6, 1.7, 1.74, 1.77, 1.79][n], 4),
    "no end": (lambda n: float(n), 16),
}


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("curve", CURVES)
def test_finds_the_fastest_number(curve: str, noise: float) -> None:
    speed, best = CURVES[curve]
    gpu = SimulatedGpu(speed, [SimulatedRun() for _ in range(40)], noise=noise)
    assert gpu.train() == best
    assert gpu.most <= best + 1, "one more is tried, to see that it does not pay off"
    assert f"staying at {best}" in gpu.said[-1]
    count = len(gpu.said)
    assert gpu.train(200) == best
    assert len(gpu.said) == count, "the search is over"


def test_reports_speeds_relative_to_one_run() -> None:
    gpu = SimulatedGpu(CURVES["a peak at 3"][0], [SimulatedRun() for _ in range(9)])
    gpu.train()
    assert gpu.said == [
        "the speed of 1 at a time is measured; trying 2",
        "2 runs at once are 1.50 times as fast as 1; trying 3",
        "3 runs at once are 1.70 times as fast as 1; trying 4",
        "4 runs at once are 1.40 times as fast as 1; staying at 3",
    ]


@pytest.mark.parametrize("steps", [2500, 4000, 7001])
def test_runs_that_end_in_between(steps: int) -> None:
    """A window that a run's end or start falls into does not count."""
    gpu = SimulatedGpu(CURVES["a peak at 3"][0], [SimulatedRun(steps=steps) for _ in range(80)], noise=0.02)
    assert gpu.train(600) == 3
    assert "4 runs at once" in gpu.said[-1]


def test_stops_where_memory_ends() -> None:
    gpu = SimulatedGpu(float, [SimulatedRun() for _ in range(20)], size=50, each=10)
    assert gpu.train() == 4, "5 in use before, 40 by four runs, 5 free"
    assert gpu.most == 4
    assert gpu.said[-1].endswith("staying at 4, since there is no GPU memory for another")


def test_a_run_without_memory_lowers_the_number() -> None:
    gpu = SimulatedGpu(float, [SimulatedRun() for _ in range(20)])
    while len(gpu.running) < 5:
        gpu.second()
    gpu.packing.too_many({name: ObservedRun("net", "net", None) for name in gpu.running})
    gpu.waiting.append(gpu.running.popitem()[1])  # it died
    assert gpu.packing.limit == 4
    assert gpu.train() == 4
    assert gpu.most == 5
    for _ in range(9):  # and with one that needs far more than the others
        gpu.packing.too_many({name: ObservedRun("net", "net", None) for name in list(gpu.running)[: gpu.packing.limit]})
    assert gpu.train() == 1


def test_a_run_that_dies_does_not_disturb_the_search() -> None:
    gpu = SimulatedGpu(CURVES["a plateau from 4"][0], [SimulatedRun() for _ in range(40)])
    for second in range(1500):
        gpu.second()
        if second % 40 == 7 and gpu.running:
            name, dead = next(iter(gpu.running.items()))
            del gpu.running[name]
            gpu.waiting.append(SimulatedRun(steps=int(dead.left)))
    assert gpu.packing.limit == 4


def test_steps_of_different_lengths_are_not_added() -> None:
    """Every recipe takes longer for a step than the one before, and the number is the same as for one recipe."""
    runs = [SimulatedRun(cost=1.3**i, recipe=f"net {i}") for i in range(8)]
    gpu = SimulatedGpu(CURVES["a plateau from 4"][0], runs)
    assert gpu.train() == 4
    assert any(said.startswith("4 runs at once are 4.00 times as fast as 1") for said in gpu.said)


def test_each_network_has_its_own_number() -> None:
    speeds = {"small": lambda n: min(n, 5), "large": lambda n: [0, 1, 1.5, 1.3, 1.2, 1.1, 1.0][n]}
    runs = [SimulatedRun("small", 30_000) for _ in range(20)] + [SimulatedRun("large", 6_000) for _ in range(40)]
    gpu = SimulatedGpu(lambda n: 1.0, [*runs, *(SimulatedRun("small", 30_000) for _ in range(20))])

    def speed(n: int) -> float:
        return float(speeds[next(iter(gpu.running.values())).network](n))

    gpu.speed = speed
    found: dict[str, int] = {}
    while gpu.waiting:
        gpu.second()
        networks = {run.network for run in gpu.running.values()}
        if len(networks) == 1 and gpu.packing.limit == len(gpu.running):
            found[networks.pop() + (" again" if len(gpu.waiting) < 20 else "")] = gpu.packing.limit
    assert found == {"small": 5, "large": 2, "small again": 5}


def test_a_given_number_is_kept() -> None:
    packing = Packing(list, limit=3)
    for second in range(100):
        runs = {str(i): ObservedRun("net", "net", Beat(float(second), 100 * second, second)) for i in range(3)}
        assert packing.observe(runs) is None
    assert packing.limit == 3


def test_long_epochs_have_long_windows() -> None:
    """Within a window of 10 s, a run with long epochs may or may not evaluate."""
    packing, run = Packing(list), {}
    said = []
    for second in range(1, 80):
        run["a"] = ObservedRun("net", "net", Beat(float(second), 100 * second, 0))
        said.append(packing.observe(run))
    assert [i + 1 for i, text in enumerate(said) if text] == [64]
