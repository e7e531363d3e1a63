"""Both budgets hold with every rule, at every step and at the end, with HAM's step too, and on several processes."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import wirings
from wirings import WiringError, rules, wire_
from wirings.profiling import profile

pytestmark = pytest.mark.filterwarnings("ignore:share=.* leaves a single edge")  # with budgets as small as these

SHAPE, EDGES, LIMIT, STEPS = (3, 8, 8), 120, 5200, 16
RULES: dict[str, dict[str, Any]] = {
    "dnw": {}, "dnw, cubic": {"schedule": {"end": 0.5}}, "soft_threshold": {},
    "soft_threshold, cubic": {"schedule": {"end": 0.5}}, "gmp": {"every": 1}, "rigl": {"every": 2}, "set": {"every": 2},
    "acdc": {}, "top_kast": {}, "decayed_gradient": {}, "l1_anneal": {}, "targeted_dropout": {}, "random": {},
    "no_update": {}, "lottery": {},
}  # fmt: skip


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    first, second, third = (nn.Conv2d(a, b, 3, s, padding=1) for a, b, s in ((3, 8, 1), (8, 12, 2), (12, 12, 2)))
    return nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), second, third, nn.Flatten(), nn.Linear(48, 10))


def known(name: str) -> bool:
    return name.split(",")[0] in rules.names()


@pytest.mark.parametrize(
    ("share", "ham"), [("uniform", False), ("erk", False), ("global", False), ("scaled", False), ("scaled", True)]
)
@pytest.mark.parametrize("name", [name for name in RULES if known(name)])
def test_with_every_rule(name: str, share: str, ham: bool) -> None:
    model, rule = network(), rules.get(name.split(",")[0], **RULES[name])
    wiring = wire_(model, rule, k=EDGES, mult_adds=LIMIT, example_input=SHAPE, share=share)
    wiring.plan(STEPS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if ham:
        wirings.HAM(optimizer, wiring)
    scheduled = rule.schedule is not None
    for step in range(1, STEPS + 1):
        if step == 13 and not scheduled and not rule.keeps_wiring:
            wiring.steps = 99  # the next step ranks layers again
            wiring.plan(200)
        optimizer.zero_grad()
        model.train()(torch.randn(4, *SHAPE)).square().mean().backward()
        optimizer.step()
        wiring.step(optimizer)
        edges = sum(report.edges for report in wiring.report())
        if scheduled and step < STEPS // 2:
            assert edges >= EDGES + (step < 4), "all edges at first: neither budget holds before the schedule ends"
            continue
        counted = profile(model, SHAPE)
        assert edges == EDGES
        assert counted.live_mult_adds <= counted.mult_adds <= LIMIT
    finalized = wirings.finalize_(model)
    assert profile(finalized, SHAPE).mult_adds <= LIMIT


@pytest.mark.parametrize("name", ["str", "sparse_momentum"])
def test_rules_that_move_edges_are_refused(name: str) -> None:
    with pytest.raises(WiringError, match="moves edges between layers"):
        wire_(network(), name, k=EDGES, mult_adds=LIMIT, example_input=SHAPE)


def test_pairs_that_cannot_be_met_name_the_nearest() -> None:
    for share in ("uniform", "erk", "global", "scaled"):
        settings: dict[str, Any] = {"k": EDGES, "example_input": SHAPE, "share": share}
        with pytest.raises(WiringError, match="with 120 edges is mult_adds = ") as caught:
            wire_(network(), mult_adds=200, **settings)
        found = re.search(r"mult_adds = ([\d,]+), and with 200 multiply-adds .* at most ([\d,]+)", str(caught.value))
        assert found is not None
        nearest, most = (int(text.replace(",", "")) for text in found.groups())
        model = network()
        wire_(model, mult_adds=nearest, **settings)
        assert profile(model, SHAPE).mult_adds == nearest
        model = network()
        wire_(model, mult_adds=200, **settings | {"k": most})
        assert profile(model, SHAPE).mult_adds <= 200


def test_removed_edges_are_not_asked_for_when_a_schedule_ends() -> None:
    """The ranking at the end would ask a layer for more edges than gmp has left it."""
    model = network()
    rule = rules.get("gmp", every=1, schedule={"end": 0.5})
    wiring = wire_(model, rule, k=EDGES, mult_adds=LIMIT, example_input=SHAPE, share="global")
    wiring.plan(STEPS)
    for step in range(1, STEPS + 1):
        if step == STEPS // 2:
            with torch.no_grad():
                wiring.layers[3].weight.mul_(100.0)
        wiring.step()
    assert sum(report.edges for report in wiring.report()) == EDGES
    assert profile(model, SHAPE).mult_adds <= LIMIT


def test_warns_if_a_bound_cuts_off_a_large_layer() -> None:
    model = nn.Sequential(nn.Conv2d(3, 40, 3, padding=1), nn.Flatten(), nn.Linear(40 * 64, 10))
    with pytest.warns(UserWarning, match=r'share="uniform" with mult_adds= leaves a single edge in 1 of 2 layers \(0'):
        wire_(model, k=500, mult_adds=499 + 64, example_input=SHAPE)
