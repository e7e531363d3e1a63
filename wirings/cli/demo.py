"""The main job in a minute: a network that learns its wiring beside one whose wiring is random, on embedded digits.

Both have the same number of edges, the same training, and for each seed the same initial weights, but for a factor. The
learning rate, and where there are several the factor, are chosen for each of them from the same values, on images that
neither trains nor is tested on. The examples compare neural graphs in the same way.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.train.data import digits
from wirings.wire.finalize import finalize_
from wirings.wire.handle import Wiring
from wirings.wire.wire import wire_


@dataclass(frozen=True)
class Settings:
    """What the demo trains."""

    density: float = 0.02
    width: int = 256
    epochs: int = 25
    batch: int = 100
    momentum: float = 0.9
    weight_decay: float = 1e-4
    learning_rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    gains: tuple[float, ...] = (1.0,)
    """Factors for the initial weights of the edges."""
    clip: float | None = None
    """The largest norm of a gradient, real edges counted."""
    trial_seeds: int = 2
    """Runs a learning rate and gain, on the validation images, to choose them by."""
    seeds: int = 5

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise WiringError(f"the demo needs at least 2 seeds for a standard deviation, but seeds = {self.seeds}.")

    @property
    def runs(self) -> int:
        """How many networks are trained for one rule."""
        return len(self.learning_rates) * len(self.gains) * self.trial_seeds + self.seeds


@dataclass
class Outcome:
    """What one rule reached."""

    rule: str
    edges: int
    lr: float
    gain: float
    accuracies: list[float] = field(default_factory=list)
    """On the test images, in percent, one a seed."""
    swapped: list[int] = field(default_factory=list)
    """Edges that became real while training, summed over epochs, one a seed."""
    weights: list[Tensor] = field(default_factory=list)
    """The first seed's finalized linear layers, for the picture."""

    @property
    def mean(self) -> float:
        return statistics.mean(self.accuracies)

    @property
    def std(self) -> float:
        return statistics.stdev(self.accuracies)

    def ahead_of(self, other: Outcome) -> float:
        """By how many pooled standard deviations the mean is above the other's."""
        pooled = ((self.std**2 + other.std**2) / 2) ** 0.5
        return (self.mean - other.mean) / pooled if pooled else float("inf")


@dataclass(frozen=True)
class Split:
    """Images (pixels in rows) and labels for training and for measuring."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def splits() -> tuple[Split, Split]:
    """For choosing a learning rate: 1,100 images and 300 others. For the result: those 1,400 and the remaining 397."""
    images, labels = digits.load()
    x, order = images.flatten(1), torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, validation, test = order[:1100], order[1100:1400], order[1400:]
    both = order[:1400]
    return (
        Split(x[train], labels[train], x[validation], labels[validation]),
        Split(x[both], labels[both], x[test], labels[test]),
    )


Make = Callable[[str, Settings], tuple[nn.Sequential, Wiring]]
"""Makes a network for a rule, from rows of 64 pixels to 10 numbers, and its wiring."""


def perceptron(rule: str, settings: Settings) -> tuple[nn.Sequential, Wiring]:
    """Three layers of edges. A norm after each hidden one, so that a sparse network is not at a loss for its scale."""
    width = settings.width
    model = nn.Sequential(
        nn.Linear(64, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )
    return model, wire_(model, rule, density=settings.density)


@dataclass(frozen=True)
class Trained:
    """A finalized network, its accuracy in percent, its edges, and how many of them were swapped in training."""

    model: nn.Sequential
    accuracy: float
    edges: int
    swapped: int


def train(make: Make, rule: str, lr: float, gain: float, seed: int, split: Split, settings: Settings) -> Trained:
    """Train one network."""
    torch.manual_seed(seed)
    model, wiring = make(rule, settings)
    with torch.no_grad():
        for layer in wiring.layers:
            layer.weight.mul_(gain)
    optimizer = torch.optim.SGD(model.parameters(), lr, settings.momentum, weight_decay=settings.weight_decay)
    steps = settings.epochs * (len(split.y) // settings.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    shuffle, swapped = torch.Generator().manual_seed(seed), 0
    for _ in range(settings.epochs):
        order = torch.randperm(len(split.y), generator=shuffle)
        for batch in order[: len(order) // settings.batch * settings.batch].split(settings.batch):
            loss = nn.functional.cross_entropy(model(split.x[batch]), split.y[batch])
            optimizer.zero_grad()
            loss.backward()
            if settings.clip is not None:
                wiring.clip_grad_norm_(settings.clip)
            optimizer.step()
            wiring.step()
            schedule.step()
        layers = wiring.look()
        swapped += sum(layer.swapped for layer in layers)
    edges = sum(layer.edges for layer in layers)
    if not all(p.isfinite().all() for p in model.parameters()):
        return Trained(model, 0.0, edges, swapped)  # too high a learning rate: it has got nothing right
    finalize_(model.eval())
    with torch.no_grad():
        accuracy = (model(split.x_test).argmax(1) == split.y_test).float().mean().item()
    return Trained(model, 100 * accuracy, edges, swapped)


def compare(
    settings: Settings,
    rules: Sequence[str] = ("dnw", "random"),
    progress: Callable[[str], None] = lambda what: None,
    make: Make = perceptron,
) -> list[Outcome]:
    """Run the comparison; ``progress`` is told what each training is for, before it starts."""
    validation, test = splits()
    outcomes = []
    for rule in rules:

        def trial(choice: tuple[float, float], rule: str = rule) -> float:
            accuracies = []
            for seed in range(settings.trial_seeds):
                progress(f"{rule}: learning rate {choice[0]}" + (f", gain {choice[1]}" if settings.gains[1:] else ""))
                accuracies.append(train(make, rule, *choice, 1000 + seed, validation, settings).accuracy)
            return statistics.mean(accuracies)

        lr, gain = max(itertools.product(settings.learning_rates, settings.gains), key=trial)
        outcome = Outcome(rule, 0, lr, gain)
        for seed in range(settings.seeds):
            progress(f"{rule}: seed {seed}")
            trained = train(make, rule, lr, gain, seed, test, settings)
            outcome.accuracies.append(trained.accuracy)
            outcome.swapped.append(trained.swapped)
            if seed == 0:
                outcome.edges = trained.edges
                outcome.weights = [m.weight.detach() for m in trained.model if isinstance(m, nn.Linear)]
        outcomes.append(outcome)
    return outcomes


def command(description: str, settings: Settings, make: Make) -> None:
    """An example's command line: compare dnw with a random graph, and print what came out."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=settings.seeds)
    settings = replace(settings, seeds=parser.parse_args().seeds)
    outcomes = compare(settings, progress=lambda what: print(f"\r{what:40}", end="", flush=True), make=make)
    print("\r", end="")
    for outcome in outcomes:
        gain = f", gain {outcome.gain}" if settings.gains[1:] else ""
        print(
            f"{outcome.rule:8} {outcome.edges} edges, learning rate {outcome.lr}{gain}: "
            f"{outcome.mean:.1f} ± {outcome.std:.1f} %"
        )
    print(f"dnw is ahead by {outcomes[0].ahead_of(outcomes[1]):.1f} pooled standard deviations")


def draw(outcomes: Sequence[Outcome], path: str) -> None:
    """The first network of every rule, side by side, into a PNG."""
    from matplotlib.figure import Figure

    from wirings.draw import layered

    figure = Figure(figsize=(5.2 * len(outcomes), 5.6), layout="constrained")
    for ax, outcome in zip(figure.subplots(1, len(outcomes), squeeze=False)[0], outcomes, strict=True):
        title = f"{outcome.rule}: {outcome.edges:,} edges, {outcome.mean:.1f} ± {outcome.std:.1f} %"
        layered(ax, outcome.weights, title, outputs=[str(digit) for digit in range(10)])
    figure.savefig(path, dpi=130)
