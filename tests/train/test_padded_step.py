"""Steps on padded batches: the gradient is that of the mean loss over real labels, on one process and on two."""

import os
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wirings import models
from wirings.train import recipes
from wirings.train.data.pair_loader import PairLoader
from wirings.train.distributed import leave, start
from wirings.train.run.optimizer import make_optimizer
from wirings.train.run.step import TrainingStep
from wirings.train.settings import with_overrides

SOURCE = [[3, 4], [5, 6, 7, 8, 9], [4], [3, 5]]
TARGET = [[6], [7, 8, 9], [5, 6, 7, 8], []]
CHANGES = ["optimizer.name=sgd", "optimizer.lr=1.0", "optimizer.momentum=0", "optimizer.weight_decay=0", "clip=null"]
CHANGES += ["optimizer.betas=[0.9, 0.999]", "optimizer.eps=1e-8", "label_smoothing=0", "precision=fp32"]


def network() -> Any:
    torch.manual_seed(0)
    return models.get("seq2seq", classes=11, layers=1, width=16, heads=2, hidden=16, dropout=0.0, attention_dropout=0.0)


def loader(rank: int = 0, world: int = 1) -> PairLoader:
    return PairLoader(SOURCE, TARGET, lengths=[8], batch=4, rank=rank, world=world)


def make_step(model: nn.Module, world: int = 1, accumulate: int = 1) -> TrainingStep:
    settings, _ = with_overrides(recipes.get("translate/dense").settings, [*CHANGES, f"accumulate={accumulate}"])
    cpu = torch.device("cpu")
    return TrainingStep(model, None, make_optimizer(model, None, settings, cpu), settings, cpu, world, padded=True)


def moved(model: nn.Module) -> list[Tensor]:
    """By how much the step changed the weights: the gradient, since the learning rate is 1."""
    return [
        before.detach() - now.detach() for before, now in zip(network().parameters(), model.parameters(), strict=True)
    ]


def mean_loss() -> tuple[Tensor, list[Tensor]]:
    """The mean loss over all real labels of the batch, and its gradient."""
    model = network()
    [(x, y)] = loader().epoch(0)
    assert (y >= 0).sum() == 12 < y.numel() == 32
    loss = cross_entropy(model(x).flatten(0, -2), y.flatten())
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_gradient_is_that_of_the_logged_loss(accumulate: int) -> None:
    step = make_step(network(), accumulate=accumulate)
    [(x, y)] = loader().epoch(0)
    step(x, y, 4)
    loss, gradient = mean_loss()
    torch.testing.assert_close(moved(step.model), gradient, rtol=1e-4, atol=1e-6)
    logged, _, labels = step.read()
    assert (logged, labels) == (pytest.approx(loss.item()), 12)


def work(folder: Path) -> None:
    """Make a step with this process's half of the batch, and save what it changed."""
    rank, context = int(os.environ["RANK"]), start("cpu")
    step = make_step(network(), world=2)
    step.used = nn.parallel.DistributedDataParallel(step.model)
    [(x, y)] = loader(rank, 2).epoch(0)
    step(x, y, 4)
    torch.save(moved(step.model), folder / f"{rank}.pt")
    context.barrier()
    leave()


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
def test_two_processes_count_the_labels_of_both(tmp_path: Path) -> None:
    outputs = [tmp_path / f"output{rank}.txt" for rank in range(2)]
    ranks = [
        processes.start(work, tmp_path, output=output, env=env)
        for output, env in zip(outputs, processes.rank_environments(2), strict=True)
    ]
    assert [processes.wait(rank, 120) for rank in ranks] == [0, 0], [output.read_text() for output in outputs]
    _, gradient = mean_loss()
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), gradient, rtol=1e-4, atol=1e-6)
