"""Wire a pretrained network and continue training with a tenth of its edges, on the embedded digits.

First a dense network is trained. Then a tenth of its weights is kept, in one of these ways:

- ``cut``: keep the largest weights, without further training;
- ``fine_tune``: keep the largest weights and train them further;
- ``dnw``: train further, and learn which weights to keep;
- ``dnw, schedule``: the same, but the density falls from 100 % to 10 % over the first half of this training;
- ``dnw, new``: start from new weights, with as many epochs as the others have in both phases together.

The learning rate of the second phase is tuned for each way on validation images.

    python examples/pretrained_digits.py [--seeds 5]
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import wirings
from wirings.cli.comparison import DigitsSplit, splits

DENSITY = 0.1
FIRST, SECOND = 20, 20
"""Epochs of dense training, and of training after wiring."""
DENSE_LR, RATES = 0.1, (0.01, 0.03, 0.1, 0.3)
BATCH = 100
Result = dict[str, Any]


def network() -> nn.Sequential:
    hidden = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(64, 10))


def fit(
    model: nn.Sequential, wiring: wirings.Wiring | None, split: DigitsSplit, epochs: int, lr: float, seed: int
) -> None:
    """An ordinary training loop; the only addition for wired networks is wiring.step()."""
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=1e-4)
    steps = epochs * (len(split.y) // BATCH)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    shuffle = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(split.y), generator=shuffle)
        for batch in order[: len(order) // BATCH * BATCH].split(BATCH):
            loss = nn.functional.cross_entropy(model(split.x[batch]), split.y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            cosine.step()
            if wiring is not None:
                wiring.step(optimizer)


def accuracy(model: nn.Sequential, split: DigitsSplit) -> float:
    with torch.no_grad():
        right = model.eval()(split.x_test).argmax(1) == split.y_test
    return 100 * right.float().mean().item()


def pretrained(split: DigitsSplit, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = network()
    fit(model, None, split, FIRST, DENSE_LR, seed)
    return model


def continue_training(way: str, dense: nn.Sequential, split: DigitsSplit, lr: float, seed: int) -> tuple[float, int]:
    """Continue in one way from a pretrained network. Returns the accuracy in percent and the number of edges."""
    model, epochs = copy.deepcopy(dense), SECOND
    if way == "dnw, new":
        torch.manual_seed(seed)
        model, epochs = network(), FIRST + SECOND
    density: Any = DENSITY
    if way == "dnw, schedule":
        density = wirings.CubicSchedule(1.0, DENSITY, steps=SECOND // 2 * (len(split.y) // BATCH))
    model.train()
    wiring = wirings.wire_(
        model, "fine_tune" if way == "fine_tune" else "dnw", density=density
    )  # starts from the pretrained weights
    if way != "cut":
        fit(model, wiring, split, epochs, lr, seed)
    wirings.finalize_(model)
    edges = sum(int(layer.weight.count_nonzero()) for layer in model if isinstance(layer, nn.Linear))
    return accuracy(model, split), edges


WAYS = ("cut", "fine_tune", "dnw", "dnw, schedule", "dnw, new")


def compare(seeds: int = 5, say: Callable[[str], None] = print, trial_seeds: int = 2) -> Result:
    """Accuracies in percent for each seed: of the dense network, and of every way with a tenth of its weights."""
    validation, test = splits()
    trials = [(1000 + seed, pretrained(validation, 1000 + seed)) for seed in range(trial_seeds)]
    networks = [(seed, pretrained(test, seed)) for seed in range(seeds)]
    dense = [accuracy(model, test) for _, model in networks]
    say(f"dense: {statistics.mean(dense):.1f} ± {statistics.stdev(dense):.1f} %")
    outcomes: list[Result] = [{"way": "dense", "lr": DENSE_LR, "edges": 64 * 64 * 2 + 640, "accuracies": dense}]
    for way in WAYS:

        def validation_accuracy(lr: float, way: str = way) -> float:
            return statistics.mean(continue_training(way, model, validation, lr, seed)[0] for seed, model in trials)

        lr = 0.0 if way == "cut" else max(RATES, key=validation_accuracy)
        results = [continue_training(way, model, test, lr, seed) for seed, model in networks]
        accuracies, edges = [a for a, _ in results], results[0][1]
        outcomes.append({"way": way, "lr": lr, "edges": edges, "accuracies": accuracies})
        mean, std = statistics.mean(accuracies), statistics.stdev(accuracies)
        say(f"{way}: {edges:,} edges, learning rate {lr:g}: {mean:.1f} ± {std:.1f} %")
    return {"density": DENSITY, "epochs": [FIRST, SECOND], "outcomes": outcomes}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    compare(parser.parse_args().seeds)
