"""Compare a learned wiring with a random one on the embedded digits: the demo, and the examples of neural graphs.

Both networks have the same number of edges, the same training and, for each seed, the same initial weights up to a
factor. The learning rate, and the factor if there are several, are chosen for each rule from the same values, on images
that are used neither for training nor for testing.
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
class ComparisonSettings:
    """How the networks of a comparison are built and trained."""

    density: float = 0.02
    """Fraction of the edges that are real."""
    width: int = 256
    """Nodes of a hidden layer."""
    epochs: int = 25
    batch: int = 100
    momentum: float = 0.9
    weight_decay: float = 1e-4
    learning_rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    """Learning rates to choose from."""
    gains: tuple[float, ...] = (1.0,)
    """Factors of the initial weights to choose from."""
    clip: float | None = None
    """Largest norm of the gradient over real edges, or None for no clipping."""
    trial_seeds: int = 2
    """Networks to train for each learning rate and gain, measured on the validation images."""
    seeds: int = 5
    """Networks to train for each rule, measured on the test images."""

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise WiringError(f"seeds must be at least 2, since their standard deviation is shown, got {self.seeds}.")

    @property
    def runs(self) -> int:
        """Number of networks that are trained for one rule."""
        return len(self.learning_rates) * len(self.gains) * self.trial_seeds + self.seeds


@dataclass
class RuleOutcome:
    """The results of one rule."""

    rule: str
    edges: int
    lr: float
    gain: float
    accuracies: list[float] = field(default_factory=list)
    """Accuracy of each seed on the test images, in percent."""
    swapped: list[int] = field(default_factory=list)
    """Edges of each seed that became real in training, summed over epochs."""
    weights: list[Tensor] = field(default_factory=list)
    """Weights of the first seed's finalized linear layers, for the picture."""

    @property
    def mean(self) -> float:
        return statistics.mean(self.accuracies)

    @property
    def std(self) -> float:
        return statistics.stdev(self.accuracies)

    def ahead_of(self, other: RuleOutcome) -> float:
        """How many pooled standard deviations the mean accuracy is above the other's."""
        pooled = ((self.std**2 + other.std**2) / 2) ** 0.5
        return (self.mean - other.mean) / pooled if pooled else float("inf")


@dataclass(frozen=True)
class DigitsSplit:
    """Images, float32 (n, 64), and labels for training and for testing."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def splits() -> tuple[DigitsSplit, DigitsSplit]:
    """Return two splits: 1,100 + 300 images to choose a learning rate, these 1,400 + the other 397 for the result."""
    images, labels = digits.load()
    x, order = images.flatten(1), torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, validation, test = order[:1100], order[1100:1400], order[1400:]
    both = order[:1400]
    return (
        DigitsSplit(x[train], labels[train], x[validation], labels[validation]),
        DigitsSplit(x[both], labels[both], x[test], labels[test]),
    )


BuildNetwork = Callable[[str, ComparisonSettings], tuple[nn.Sequential, Wiring]]
"""Builds a network for a rule, from 64 pixels to 10 logits, and wires it."""


def perceptron(rule: str, settings: ComparisonSettings) -> tuple[nn.Sequential, Wiring]:
    """Build a perceptron of three layers. Norms after the hidden ones make up for the smaller scale of sparse sums."""
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
class TrainedNetwork:
    """A finalized network, its accuracy in percent, its number of edges, and how many were swapped in training."""

    model: nn.Sequential
    accuracy: float
    edges: int
    swapped: int


def train(
    build: BuildNetwork, rule: str, lr: float, gain: float, seed: int, split: DigitsSplit, settings: ComparisonSettings
) -> TrainedNetwork:
    """Train one network."""
    torch.manual_seed(seed)
    model, wiring = build(rule, settings)
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
        return TrainedNetwork(model, 0.0, edges, swapped)  # the learning rate was too high
    finalize_(model.eval())
    with torch.no_grad():
        accuracy = (model(split.x_test).argmax(1) == split.y_test).float().mean().item()
    return TrainedNetwork(model, 100 * accuracy, edges, swapped)


def compare(
    settings: ComparisonSettings,
    rules: Sequence[str] = ("dnw", "random"),
    progress: Callable[[str], None] = lambda what: None,
    build: BuildNetwork = perceptron,
) -> list[RuleOutcome]:
    """Run the comparison.

    Args:
        settings: How networks are built and trained.
        rules: Names of the rules to compare.
        progress: Called with a description before each network is trained.
        build: Builds a network.
    """
    validation, test = splits()
    outcomes = []
    for rule in rules:

        def trial(choice: tuple[float, float], rule: str = rule) -> float:
            accuracies = []
            for seed in range(settings.trial_seeds):
                progress(f"{rule}: learning rate {choice[0]}" + (f", gain {choice[1]}" if settings.gains[1:] else ""))
                accuracies.append(train(build, rule, *choice, 1000 + seed, validation, settings).accuracy)
            return statistics.mean(accuracies)

        lr, gain = max(itertools.product(settings.learning_rates, settings.gains), key=trial)
        outcome = RuleOutcome(rule, 0, lr, gain)
        for seed in range(settings.seeds):
            progress(f"{rule}: seed {seed}")
            trained = train(build, rule, lr, gain, seed, test, settings)
            outcome.accuracies.append(trained.accuracy)
            outcome.swapped.append(trained.swapped)
            if seed == 0:
                outcome.edges = trained.edges
                outcome.weights = [m.weight.detach() for m in trained.model if isinstance(m, nn.Linear)]
        outcomes.append(outcome)
    return outcomes


def command(description: str, settings: ComparisonSettings, build: BuildNetwork) -> None:
    """Run an example from the command line: compare dnw with a random graph and print the results."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=settings.seeds)
    settings = replace(settings, seeds=parser.parse_args().seeds)
    outcomes = compare(settings, progress=lambda what: print(f"\r{what:40}", end="", flush=True), build=build)
    print("\r", end="")
    for outcome in outcomes:
        gain = f", gain {outcome.gain}" if settings.gains[1:] else ""
        print(
            f"{outcome.rule:8} {outcome.edges} edges, learning rate {outcome.lr}{gain}: "
            f"{outcome.mean:.1f} ± {outcome.std:.1f} %"
        )
    print(f"dnw is ahead by {outcomes[0].ahead_of(outcomes[1]):.1f} pooled standard deviations")


def draw_networks(outcomes: Sequence[RuleOutcome], path: str) -> None:
    """Draw the first network of every rule, side by side, to a PNG file."""
    from matplotlib.figure import Figure

    from wirings.draw import layered

    figure = Figure(figsize=(5.2 * len(outcomes), 5.6), layout="constrained")
    for ax, outcome in zip(figure.subplots(1, len(outcomes), squeeze=False)[0], outcomes, strict=True):
        title = f"{outcome.rule}: {outcome.edges:,} edges, {outcome.mean:.1f} ± {outcome.std:.1f} %"
        layered(ax, outcome.weights, title, outputs=[str(digit) for digit in range(10)])
    figure.savefig(path, dpi=130)
