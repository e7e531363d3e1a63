"""SET and RigL: which edges are lost, which grow, and that nothing else is kept about them."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import wirings
from wirings import WiringError
from wirings.rules import SET, RigL

# 2 × 4 edges, of which the left half is real.
LEFT = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0]]).bool()
WEIGHT = torch.tensor([[5.0, -1.0, 0, 0], [2.0, -4.0, 0, 0]])
GRADIENT = torch.tensor([[0.1, 0.2, 0.3, -0.9], [0.8, 0.1, 0.7, 0.5]])


def wired(rule: SET, **settings: object) -> tuple[nn.Linear, wirings.Wiring]:
    model = nn.Linear(4, 2, bias=False)
    wiring = wirings.wire_(model, rule, **{"k": 4, **settings})
    with torch.no_grad():
        wiring.layers[0].weight.copy_(WEIGHT)
        for name in ("wiring", "reach"):
            if name in wiring.layers[0].edges._buffers:
                getattr(wiring.layers[0].edges, name).copy_(LEFT)
    return model, wiring


def train(model: nn.Linear, wiring: wirings.Wiring, optimizer: torch.optim.Optimizer, steps: int = 1) -> list[Tensor]:
    """Train with a known gradient, too small to change the order of the weights; return the gradients of all steps."""
    gradients = []
    for _ in range(steps):
        optimizer.zero_grad()
        (model.weight * GRADIENT).sum().backward()
        gradients.append(wiring.layers[0].weight.grad.clone())
        optimizer.step()
        wiring.step(optimizer)
    return gradients


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, weight_decay=1e-4),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-4),
    "rmsprop_momentum": lambda p: torch.optim.RMSprop(p, lr=1e-4, momentum=0.9),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-3),
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


@each_optimizer
def test_rigl_grows_where_the_gradient_is_largest(make: object) -> None:
    """Half of the 4 edges are lost, −1 and 2. Among the 4 others, the largest gradients are −0.9 and 0.7."""
    model, wiring = wired(RigL(0.5, decay="constant", every=3, steps=9, listen=1))
    optimizer = make([wiring.layers[0].weight])
    before = train(model, wiring, optimizer, 2)
    assert wiring.masks()["weight"].tolist() == LEFT.tolist(), "not its turn yet"
    (listening,) = train(model, wiring, optimizer)
    assert wiring.masks()["weight"].tolist() == [[True, False, False, True], [False, True, True, False]]
    used = wiring.layers[0].weight.detach()
    torch.testing.assert_close(used, torch.tensor([[5.0, 0, 0, 0], [0, -4.0, 0, 0]]), atol=0.01, rtol=0)
    assert used.count_nonzero() == 2, "all but the edges that stayed are exactly zero"
    for name, state in optimizer.state[wiring.layers[0].weight].items():
        if isinstance(state, Tensor) and state.shape == used.shape:
            assert not state[used == 0].any(), f"{name} was not reset"
    real = torch.where(LEFT, GRADIENT, 0.0)
    assert [torch.equal(gradient, real) for gradient in before] == [True, True], "hallucinated edges get no gradient"
    assert torch.equal(listening, GRADIENT), "except in the step before the change"
    (after,) = train(model, wiring, optimizer)
    assert torch.equal(after, torch.where(wiring.masks()["weight"], GRADIENT, 0.0))


@each_optimizer
def test_rigl_grows_by_gradient_after_a_plain_checkpoint(make: object) -> None:
    """The checkpoint's hallucinated weights are not zero, and largest where the gradient is small."""
    model, wiring = wired(RigL(0.5, decay="constant", every=3, steps=9, listen=1))
    model.load_state_dict({"weight": WEIGHT + torch.tensor([[0, 0, 3.0, 0.1], [0, 0, 0.1, 3.0]])}, strict=False)
    train(model, wiring, make([wiring.layers[0].weight]), 3)
    assert wiring.masks()["weight"].tolist() == [[True, False, False, True], [False, True, True, False]]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("SGD", {"momentum": 0.9, "dampening": 0.5}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("AdamW", {}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("Adamax", {}),
        ("RMSprop", {}),
        ("RMSprop", {"momentum": 0.9}),
        ("RMSprop", {"centered": True}),
        ("Adadelta", {}),
    ],
)
def test_rigl_grows_by_gradient_though_steps_are_divided_by_its_size(kind: str, settings: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(20, 20, bias=False)
    wiring = wirings.wire_(model, RigL(every=2, end=1.0, listen=1), density=0.2)
    wiring.plan(10)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3, **settings)
    for _ in range(3):
        before, gradient = wiring.masks()["weight"], torch.randn(20, 20) * torch.arange(1, 21)
        for _ in range(2):
            optimizer.zero_grad()
            (model.weight * gradient).sum().backward()
            optimizer.step()
            wiring.step(optimizer)
        grown = wiring.masks()["weight"] & ~before
        assert grown.any()
        assert gradient[grown].abs().min() > gradient[~grown & ~before].abs().max()


def train_alternating(
    model: nn.Linear, wiring: wirings.Wiring, optimizer: torch.optim.Optimizer, steps: int
) -> list[Tensor]:
    """Train with gradients of 0.5 ± 5 in the last column, and of 0.1 in all others; return those of the weights."""
    gradients = []
    for step in range(steps):
        gradient = torch.full((2, 4), 0.1)
        gradient[:, 3] = 0.5 + (5 if step % 2 else -5)
        optimizer.zero_grad()
        (model.weight * gradient).sum().backward()
        gradients.append(wiring.layers[0].weight.grad.clone())
        optimizer.step()
        wiring.step(optimizer)
    return gradients


@pytest.mark.parametrize(
    ("make", "listen", "column"),
    [
        (torch.optim.AdamW, None, 2),  # the consistent gradients grow
        (torch.optim.AdamW, 4, 2),
        (torch.optim.AdamW, 1, 3),  # the largest of the last step
        (OPTIMIZERS["momentum"], None, 3),
        (OPTIMIZERS["momentum"], 4, 3),  # a mean, but no mean square to divide it by
    ],
)
def test_which_gradients_rigl_grows_by(make: object, listen: int | None, column: int) -> None:
    model, wiring = wired(RigL(0.5, decay="constant", every=8, end=1.0, steps=20, listen=listen))
    train_alternating(model, wiring, make([wiring.layers[0].weight]), 8)
    grown = wiring.masks()["weight"] & ~LEFT
    assert grown[:, column].all()
    assert grown.sum() == 2


@pytest.mark.parametrize("every", [1, 2])
def test_rigl_grows_by_the_largest_of_single_gradients(every: int) -> None:
    """A gradient divided by its own magnitude says nothing, so it is not."""
    model, wiring = wired(RigL(0.5, decay="constant", every=every, steps=9))
    if every == 1:
        wiring.layers[0].edges.reach.fill_(True)
    train(model, wiring, torch.optim.AdamW([wiring.layers[0].weight], lr=1e-3), every)
    assert wiring.masks()["weight"].tolist() == [[True, False, False, True], [False, True, True, False]]


def test_rigl_listens_before_a_change() -> None:
    model, wiring = wired(RigL(0.5, decay="constant", every=6, end=0.5, steps=20, listen=3))
    weight, real = wiring.layers[0].weight, LEFT
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    for step in range(1, 13):
        (gradient,) = train_alternating(model, wiring, optimizer, 1)
        reached = step in (4, 5, 6)  # the change after step 12 would come after the end
        assert torch.equal(gradient != 0, torch.ones_like(LEFT) if reached else real), step
        real = wiring.masks()["weight"]
        assert not weight[~real].any(), "hallucinated edges weigh zero"
        moments = optimizer.state[weight]
        assert bool(moments["exp_avg"][~real].any()) == (step in (4, 5)), "what is averaged stays until the change"
        assert bool(moments["exp_avg_sq"][~real].any()) == (step in (4, 5))


def test_rigl_resumes_identically_while_it_listens() -> None:
    model, wiring = wired(RigL(0.5, every=6, end=1.0, steps=20, listen=4))
    optimizer = torch.optim.AdamW([wiring.layers[0].weight], lr=1e-3)
    train_alternating(model, wiring, optimizer, 4)
    saved = copy.deepcopy((model.state_dict(), wiring.state_dict(), optimizer.state_dict()))
    other, again = wired(RigL(0.5, every=6, end=1.0, steps=20, listen=4))
    resumed = torch.optim.AdamW([again.layers[0].weight], lr=1e-3)
    for one, state in zip((other, again, resumed), saved, strict=True):
        one.load_state_dict(state)
    train_alternating(model, wiring, optimizer, 3)
    train_alternating(other, again, resumed, 3)
    assert torch.equal(wiring.masks()["weight"], again.masks()["weight"])
    assert torch.equal(wiring.layers[0].weight, again.layers[0].weight)
    assert not torch.equal(wiring.masks()["weight"], LEFT)


@pytest.mark.parametrize(("steps", "every"), [(10, 2), (400, 20), (2_000, 100), (50_000, 100)])
def test_rigl_changes_the_wiring_in_short_trainings_too(steps: int, every: int) -> None:
    assert RigL().period(steps) == every
    assert RigL().idle(steps) is None


@each_optimizer
def test_set_grows_at_random(make: object) -> None:
    seen = set()
    for seed in range(20):
        model, wiring = wired(SET(0.5, decay="constant", every=3, seed=seed, steps=9))
        optimizer = make([wiring.layers[0].weight])
        gradients = train(model, wiring, optimizer, 3)
        assert all(torch.equal(gradient, torch.where(LEFT, GRADIENT, 0.0)) for gradient in gradients)
        mask = wiring.masks()["weight"]
        assert int(mask.sum()) == 4
        assert mask[0, 0], "the two strongest stay"
        assert mask[1, 1]
        used = wiring.layers[0].weight.detach()
        assert used.count_nonzero() == 2, "new edges start from zero"
        seen.add(tuple(mask.flatten().tolist()))
    assert len(seen) > 5


def test_the_same_seed_grows_the_same_and_every_time_something_else() -> None:
    masks = []
    for _ in range(2):
        model, wiring = wired(SET(1.0, decay="constant", every=1, seed=3, steps=20), k=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        masks.append([])
        for _ in range(5):
            train(model, wiring, optimizer)
            masks[-1].append(wiring.masks()["weight"].flatten().tolist())
    assert masks[0] == masks[1]
    assert len({tuple(mask) for mask in masks[0]}) > 1


@pytest.mark.parametrize(
    ("rule", "lost"),
    [
        (SET(0.8, "constant", every=1, end=1.0), [800] * 3),  # the schedule of its paper
        (SET(0.8, every=1, end=1.0), [int(800 * (1 + math.cos(math.pi * t / 4)) / 2) for t in (1, 2, 3)]),
        (SET(0.8, "constant", every=2, end=1.0), [0, 800, 0]),
        (SET(0.8, "constant", every=1, end=0.5), [800, 0, 0]),
        (SET(), [225, 75, 0]),  # RigL's schedule; a hundredth of training is less than a step
        (RigL(0.8, every=1, end=1.0), [682, 400, 117]),
        (RigL(0.8, every=1, end=0.5), [400, 0, 0]),
        (RigL(every=1, end=1.0), [256, 150, 43]),
        (RigL(), [0, 75, 0]),  # every other step
    ],
    ids=str,
)
def test_how_many_are_exchanged(rule: SET, lost: list[int]) -> None:
    model = nn.Linear(100, 100, bias=False)
    wiring = wirings.wire_(model, rule, k=1000)
    wiring.plan(4)
    layer, counts = wiring.layers[0], []
    optimizer = torch.optim.SGD([layer.weight], lr=1e-6)
    for _ in lost:
        with torch.no_grad():
            layer.weight.copy_(torch.where(layer.edges.wiring, torch.rand_like(layer.weight) + 1, 0.0))
        optimizer.zero_grad()
        (model.weight * torch.rand_like(layer.weight)).sum().backward()
        optimizer.step()
        wiring.step(optimizer)
        counts.append(1000 - int(layer.weight.count_nonzero()))
        assert wiring.look()[0].edges == 1000
    assert counts == lost


def test_only_allowed_edges_grow() -> None:
    allowed = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1]]).bool()
    model, wiring = wired(RigL(0.5, decay="constant", every=2, steps=9), allowed={"weight": allowed})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    _, gradient = train(model, wiring, optimizer, 2)
    assert torch.equal(gradient, torch.where(allowed, GRADIENT, 0.0))
    assert wiring.masks()["weight"].tolist() == [[True, False, True, False], [False, True, False, True]]


def test_no_more_are_lost_than_can_grow() -> None:
    model, wiring = wired(RigL(0.9, decay="constant", every=2, steps=9), k=7)
    wiring.layers[0].edges.wiring.copy_(torch.arange(8).view(2, 4) != 3)
    train(model, wiring, torch.optim.SGD(model.parameters(), lr=1e-3), 2)
    assert wiring.look()[0].edges == 7
    assert wiring.masks()["weight"][0, 3], "the only edge that was not real"


def test_a_step_without_gradients_changes_nothing() -> None:
    """As after a step that fp16's gradient scaler has skipped."""
    model, wiring = wired(RigL(0.5, every=1, steps=9))
    wiring.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert wiring.masks()["weight"].tolist() == LEFT.tolist()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_resets_hallucinated_edges_when_no_edge_is_exchanged(optimizer: str) -> None:
    """A fifth of 4 edges rounds down to zero, so that no edge is exchanged."""
    model, wiring = wired(RigL(0.2, every=2, end=1.0, steps=9))
    made = OPTIMIZERS[optimizer]([wiring.layers[0].weight])
    _, listening = train(model, wiring, made, 2)
    assert listening.all(), "the gradient has reached all edges"
    assert wiring.masks()["weight"].tolist() == LEFT.tolist()
    assert not wiring.layers[0].weight[~LEFT].any()
    for state in made.state[wiring.layers[0].weight].values():
        assert not isinstance(state, Tensor) or state.shape != LEFT.shape or not state[~LEFT].any()


@pytest.mark.parametrize("steps", [3, 12])
def test_plan_changed_while_the_gradient_reaches_all_edges(steps: int) -> None:
    """After step 3 of 8 the gradient reaches all edges, for a change after step 4. A new plan of 3 steps cancels it."""
    model, wiring = wired(RigL(0.5, "constant", every=4, end=0.75))
    wiring.plan(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    train(model, wiring, optimizer, 3)
    cancelled = pytest.warns(UserWarning, match="'rigl' will not change the wiring in a training of 3 steps")
    with cancelled if steps == 3 else nullcontext():
        wiring.plan(steps)
    first, second = train(model, wiring, optimizer, 2)
    assert torch.equal(first, GRADIENT)
    assert torch.equal(wiring.masks()["weight"], LEFT) == (steps == 3)
    real = wiring.masks()["weight"]
    assert torch.equal(second, torch.where(real, GRADIENT, 0.0)), "then it reaches only real edges"
    assert not wiring.layers[0].weight[~real].any()
    assert not optimizer.state[wiring.layers[0].weight]["momentum_buffer"][~real].any()


@pytest.mark.parametrize("make", [OPTIMIZERS["sgd"], OPTIMIZERS["momentum"]])
def test_grows_by_gradient_when_the_budget_shrinks_in_the_same_step(make: object) -> None:
    """The schedule removes the weakest of 4 edges, −1, which has the most momentum. The exchange replaces 2 by the edge
    with gradient −0.9.
    """
    rule = RigL(0.4, "constant", every=2, end=1.0, steps=9)
    model, wiring = wired(rule, k=None, density=wirings.LinearSchedule(0.5, 0.375, steps=1, begin=1))
    optimizer = make([wiring.layers[0].weight])
    train(model, wiring, optimizer, 1)
    if "momentum_buffer" in optimizer.state[wiring.layers[0].weight]:
        optimizer.state[wiring.layers[0].weight]["momentum_buffer"][0, 1] = 50.0
    train(model, wiring, optimizer, 1)
    assert wiring.masks()["weight"].tolist() == [[True, False, False, True], [False, True, False, False]]
    weight = wiring.layers[0].weight
    assert weight.count_nonzero() == 2, "only the edges that stayed"
    assert not optimizer.state[weight].get("momentum_buffer", torch.zeros(2, 4))[weight == 0].any()


def test_schedule_removes_the_weakest_and_grows_others() -> None:
    _, wiring = wired(SET(0.0, steps=9), k=None, density=wirings.LinearSchedule(0.5, 0.25, steps=2))
    wiring.step()
    assert wiring.masks()["weight"].tolist() == [[True, False, False, False], [True, True, False, False]]
    assert wiring.layers[0].weight.tolist() == [[5, 0, 0, 0], [2, -4, 0, 0]]
    _, wiring = wired(SET(0.0, steps=9), k=None, density=wirings.LinearSchedule(0.5, 1.0, steps=4))
    for count in (5, 6, 7, 8):
        wiring.step()
        assert wiring.look()[0].edges == count
        assert wiring.masks()["weight"][LEFT].all()
        assert torch.equal(wiring.layers[0].weight, WEIGHT)


def test_layers_that_share_a_budget_keep_their_numbers() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    wiring = wirings.wire_(model, RigL(0.5, every=1, end=1.0), k=20, share="global")
    wiring.plan(10)
    numbers = [report.edges for report in wiring.look()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(9, 8)).square().sum().backward()
        optimizer.step()
        wiring.step(optimizer)
    reports = wiring.look()
    assert [report.edges for report in reports] == numbers
    assert sum(report.swapped for report in reports) > 0


def test_resumes_identically_between_gradient_and_change() -> None:
    model, wiring = wired(RigL(0.5, every=3, steps=9, seed=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    train(model, wiring, optimizer, 2)
    saved = copy.deepcopy((model.state_dict(), wiring.state_dict()))
    other, again = wired(RigL(0.5, every=3, steps=9, seed=2))
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    train(model, wiring, optimizer, 2)
    train(other, again, torch.optim.SGD(other.parameters(), lr=1e-3), 2)
    assert torch.equal(wiring.masks()["weight"], again.masks()["weight"])
    assert not torch.equal(wiring.masks()["weight"], LEFT)


@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.Rprop, torch.optim.Adafactor])
def test_optimizers_that_hide_the_gradient_are_rejected_at_once(make: type) -> None:
    model, wiring = wired(RigL(0.5, every=4, steps=9))
    says = rf"'rigl' grows edges by their gradient, .* {make.__name__} keeps for weight \(.*: use SGD, .* rule 'set'"
    with pytest.raises(WiringError, match=says):
        train(model, wiring, make(model.parameters(), lr=1e-3))


class Signs(torch.optim.Optimizer):
    """Moves all edges by the same distance, and keeps no state."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad.sign()


class Divided(Signs):
    """Keeps a mean of the gradient that is divided by its magnitude, which is kept per row and column."""

    def step(self) -> None:  # type: ignore[override]
        super().step()
        p = self.param_groups[0]["params"][0]
        self.state[p] = {"exp_avg": p.grad.sign(), "exp_avg_sq_row": p.grad[:, 0], "exp_avg_sq_col": p.grad[0]}


@pytest.mark.parametrize(("make", "step"), [(Signs, 2), (Divided, 1)])
def test_custom_optimizers_that_hide_the_gradient_are_rejected(make: type, step: int) -> None:
    model, wiring = wired(RigL(0.5, every=2, end=1.0, steps=9))
    optimizer = make(model.parameters(), {"lr": 1e-3})
    train(model, wiring, optimizer, step - 1)
    with pytest.raises(WiringError, match=f"cannot be read from the state that {make.__name__} keeps for weight"):
        train(model, wiring, optimizer)


def test_mistakes() -> None:
    model, wiring = wired(RigL(steps=9))
    model.weight.sum().backward()
    with pytest.raises(
        WiringError, match=r"'rigl' reads the gradient of weight, which is not among .* of the SGD passed to"
    ):
        wiring.step(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    _, wiring = wired(RigL(steps=9))
    with pytest.raises(WiringError, match=r"'rigl' reads gradients.*call wiring.step\(optimizer\)"):
        wiring.step()
    with pytest.raises(WiringError, match="set: fraction must be a number from 0 to 1, got 2"):
        SET(2)
    with pytest.raises(WiringError, match="unknown decay 'cosin'"):
        RigL(decay="cosin")
    with pytest.raises(WiringError, match="rigl: every must be a whole number"):
        RigL(every=0)
    with pytest.raises(WiringError, match="rigl: listen must be a whole number"):
        RigL(listen=0)
