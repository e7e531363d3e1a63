"""The main job in a minute: a network that learns its wiring beside one whose wiring is random, on embedded digits.

Both have the same number of edges, the same initial weights a seed, the same training; the learning rate is chosen for
each of them from the same values, on images that neither trains nor is tested on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from wirings.data import digits
from wirings.errors import WiringError
from wirings.wire import finalize_, wire_


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
    trial_seeds: int = 2
    """Runs a learning rate, on the validation images, to choose it by."""
    seeds: int = 5

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise WiringError(f"the demo needs at least 2 seeds for a standard deviation, but seeds = {self.seeds}.")

    @property
    def runs(self) -> int:
        """How many networks are trained for one rule."""
        return len(self.learning_rates) * self.trial_seeds + self.seeds


@dataclass
class Outcome:
    """What one rule reached."""

    rule: str
    edges: int
    lr: float
    accuracies: list[float] = field(default_factory=list)
    """On the test images, in percent, one a seed."""
    swapped: list[int] = field(default_factory=list)
    """Edges that became real while training, summed over epochs, one a seed."""
    weights: list[Tensor] = field(default_factory=list)
    """The first seed's finalized weights, for the picture."""

    @property
    def mean(self) -> float:
        return statistics.mean(self.accuracies)

    @property
    def std(self) -> float:
        return statistics.stdev(self.accuracies)


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


def network(width: int) -> nn.Sequential:
    """Three layers of edges. A norm after each hidden one, so that a sparse network is not at a loss for its scale."""
    return nn.Sequential(
        nn.Linear(64, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def train(rule: str, lr: float, seed: int, split: Split, settings: Settings) -> tuple[nn.Sequential, float, int]:
    """Train one network: the finalized network, its accuracy in percent, the edges swapped."""
    torch.manual_seed(seed)
    model = network(settings.width)
    wiring = wire_(model, rule, density=settings.density)
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
            optimizer.step()
            wiring.step()
            schedule.step()
        swapped += sum(layer.swapped for layer in wiring.look())
    finalize_(model.eval())
    with torch.no_grad():
        accuracy = (model(split.x_test).argmax(1) == split.y_test).float().mean().item()
    return model, 100 * accuracy, swapped


def compare(
    settings: Settings, rules: Sequence[str] = ("dnw", "random"), progress: Callable[[str], None] = lambda what: None
) -> list[Outcome]:
    """Run the comparison; ``progress`` is told what each training is for, before it starts."""
    validation, test = splits()
    outcomes = []
    for rule in rules:

        def trial(lr: float, rule: str = rule) -> float:
            accuracies = []
            for seed in range(settings.trial_seeds):
                progress(f"{rule}: learning rate {lr}")
                accuracies.append(train(rule, lr, 1000 + seed, validation, settings)[1])
            return statistics.mean(accuracies)

        outcome = Outcome(rule, 0, max(settings.learning_rates, key=trial))
        for seed in range(settings.seeds):
            progress(f"{rule}: seed {seed}")
            model, accuracy, swapped = train(rule, outcome.lr, seed, test, settings)
            outcome.accuracies.append(accuracy)
            outcome.swapped.append(swapped)
            if not outcome.weights:
                outcome.weights = [m.weight.detach() for m in model if isinstance(m, nn.Linear)]
                outcome.edges = sum(int(weight.count_nonzero()) for weight in outcome.weights)
        outcomes.append(outcome)
    return outcomes


def draw(outcomes: Sequence[Outcome], path: str) -> None:
    """The first network of every rule, side by side, into a PNG."""
    from matplotlib.figure import Figure

    from wirings.draw import layered

    figure = Figure(figsize=(5.2 * len(outcomes), 5.6), layout="constrained")
    for ax, outcome in zip(figure.subplots(1, len(outcomes), squeeze=False)[0], outcomes, strict=True):
        title = f"{outcome.rule}: {outcome.edges:,} edges, {outcome.mean:.1f} ± {outcome.std:.1f} %"
        layered(ax, outcome.weights, title, outputs=[str(digit) for digit in range(10)])
    figure.savefig(path, dpi=130)
