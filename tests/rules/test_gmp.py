"""Gradual magnitude pruning: when edges are removed, and that it is permanent. For the schedule, see test_l1_anneal."""

import pytest
import torch
from torch import nn

import wirings
from wirings import rules
from wirings.rules import GMP, L1Anneal


def wired(rule: GMP, steps: int, k: int = 2) -> tuple[nn.Linear, wirings.Wiring]:
    model = nn.Linear(10, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(1.0, 11.0))
    wiring = wirings.wire_(model, rule, k=k)
    wiring.plan(steps)
    return model, wiring


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # 2 + 8 (1 − t)³ in the first three of four quarters, rounded down: t = 1/3 and 2/3.
        ({"every": 1}, [10, 4, 2, 2, 2]),
        ({"every": 1, "kind": "linear"}, [10, 7, 4, 2, 2]),
        ({"every": 1, "kind": "linear", "end": 1.0}, [10, 8, 6, 4, 2]),
        ({"every": 1, "kind": "linear", "begin": 0.5, "end": 1.0}, [10, 10, 10, 6, 2]),
        ({"every": 2, "kind": "linear", "end": 1.0}, [10, 10, 6, 6, 2]),
        ({"every": 100}, [10, 10, 10, 2, 2]),  # at the end of the schedule in any case
        ({}, [10, 4, 2, 2, 2]),
    ],
)
def test_number_of_edges_used_in_training(settings: dict[str, object], expected: list[int]) -> None:
    model, wiring = wired(GMP(**settings), steps=4)  # type: ignore[arg-type]
    used = []
    for _ in expected:
        used.append(int(model.weight.count_nonzero()))
        assert wiring.look()[0].edges == 2, "evaluated with k edges"
        wiring.step()
    assert used == expected


def test_removed_edges_stay_removed_and_get_no_gradient() -> None:
    model, wiring = wired(GMP(every=1, kind="linear", end=1.0), steps=4)
    wiring.step()
    assert model.weight.detach()[0].tolist() == [0, 0, *range(3, 11)], "the weakest"
    with torch.no_grad():
        wiring.layers[0].weight[0, 0] = 100.0
    model.weight.sum().backward()
    assert wiring.layers[0].weight.grad[0].tolist() == [0, 0, *[1] * 8]
    wiring.step()
    assert model.weight.detach()[0, :4].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("steps", "every"), [(40, 1), (400, 4), (20_000, 100)])
def test_removals_fit_the_length_of_training(steps: int, every: int) -> None:
    wiring = wirings.wire_(nn.Linear(100, 100), GMP(), density=0.1)
    wiring.plan(steps)
    left, removals = [10_000], []
    for step in range(1, 3 * every):
        wiring.step()
        left.append(int(wiring.layers[0].edges.left.count_nonzero()))
        if left[-1] < left[-2]:
            removals.append(step)
    assert removals == [every, 2 * every]


@pytest.mark.parametrize("rule", [GMP(every=10), L1Anneal(coefficient=0, every=10)], ids=str)
@pytest.mark.parametrize("settings", [{"k": 100}, {"k": 100, "share": "global"}], ids=str)
def test_plan_shortened_past_its_end_still_leads_to_k(rule: GMP, settings: dict[str, object]) -> None:
    models = [nn.Sequential(nn.Linear(10, 100, bias=False)) for _ in range(2)]
    wirings_of = [wirings.wire_(model, rule, **settings) for model in models]  # type: ignore[arg-type]
    for wiring in wirings_of:
        wiring.plan(100)
    for step in range(1, 91):
        for wiring, model in zip(wirings_of, models, strict=True):
            if step == 41:
                wiring.plan(50)  # whose end, step 38, has passed
            wiring.step()
            used = int(model[0].weight.count_nonzero())
            assert (used == 100) == (step >= 41), step
            assert step != 40 or used == 100 + int(900 * (1 - 40 / 75) ** 3)


def test_repeating_a_plan_removes_nothing_early() -> None:
    model, wiring = wired(GMP(every=2, kind="linear", end=1.0), steps=4)
    wiring.step()
    wiring.plan(4)
    assert int(model.weight.count_nonzero()) == 10
    for used in (6, 6, 2, 2):
        wiring.step()
        wiring.plan(4)
        assert int(model.weight.count_nonzero()) == used


def test_it_is_l1_anneal_without_the_term() -> None:
    assert isinstance(L1Anneal(), GMP)
    torch.manual_seed(0)
    start, x, ends = torch.randn(4, 12), torch.randn(16, 12), []
    for rule in (GMP(every=2), L1Anneal(coefficient=0, every=2)):
        model = nn.Linear(12, 4, bias=False)
        with torch.no_grad():
            model.weight.copy_(start)
        wiring = wirings.wire_(model, rule, density=0.25)
        wiring.plan(10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(10):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            wiring.step()
        ends.append(wirings.finalize_(model).weight.detach())
    assert torch.equal(*ends)


@pytest.mark.parametrize("share", ["uniform", "global"])
def test_warns_if_finalized_before_all_edges_were_removed(share: str) -> None:
    def trained(steps: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
        wiring = wirings.wire_(model, GMP(every=1, kind="linear", end=1.0), k=40, share=share)
        wiring.plan(4)
        for _ in range(steps):
            wiring.step()
        return model

    with pytest.warns(UserWarning, match="finalized with 40 edges, but training still used 120: rule 'gmp' had not"):
        wirings.finalize_(trained(2))
    assert sum(int(p.count_nonzero()) for p in wirings.finalize_(trained(4)).parameters()) == 40


def test_mistakes() -> None:
    with pytest.raises(wirings.WiringError, match=r"gmp: begin = 0\.9 must not be after end = 0\.75"):
        rules.get("gmp", begin=0.9)
    with pytest.raises(wirings.WiringError, match="unknown kind of annealing 'cubik'"):
        GMP(kind="cubik")
