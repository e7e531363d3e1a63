"""Sparse momentum: which edges are removed, how many move to another layer, and where new ones grow."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import wirings
from wirings import WiringError
from wirings.rules import SparseMomentum, Training
from wirings.rules.optimizers import states
from wirings.rules.sparse_momentum import _grown

# Two layers of 2 × 4 edges, of which the left halves are real: 4 in each.
LEFT = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0]]).bool()
WEIGHTS = [torch.tensor([[5.0, -1.0, 0, 0], [2.0, -4.0, 0, 0]]), torch.tensor([[1.0, 6.0, 0, 0], [-7.0, 3.0, 0, 0]])]
# The mean magnitude over real edges is 3 in the first layer and 1 in the second.
MOMENTA = [
    torch.tensor([[-6.0, 1.0, 5.0, -8.0], [4.0, 1.0, 0.5, 7.0]]),
    torch.tensor([[2.0, 0.1, 0.3, -0.2], [-0.9, 1.0, 0.4, -0.6]]),
]


# A step in which only the budget has changed.
CHANGED = Training(step=2, steps=10_000, budget_changed=True)


def two_layers(rule: SparseMomentum, **budget: object) -> tuple[nn.Module, wirings.Wiring]:
    model = nn.ModuleList([nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False)])
    wiring = wirings.wire_(model, rule, **{"density": 0.5, **budget})
    with torch.no_grad():
        for layer, weight in zip(wiring.layers, WEIGHTS, strict=True):
            layer.weight.copy_(weight)
            layer.edges.wiring.copy_(LEFT)
    return model, wiring


def sgd(wiring: wirings.Wiring, momenta: list[Tensor] = MOMENTA) -> torch.optim.SGD:
    optimizer = torch.optim.SGD([layer.weight for layer in wiring.layers], lr=0.1, momentum=0.9)
    for layer, momentum in zip(wiring.layers, momenta, strict=True):
        optimizer.state[layer.weight]["momentum_buffer"] = momentum.clone()
    return optimizer


def adam(wiring: wirings.Wiring) -> torch.optim.Adam:
    """Adam with running means that give the same momentum: both are scaled, so that their ratio is unchanged."""
    optimizer = torch.optim.Adam([layer.weight for layer in wiring.layers], lr=0.1)
    for layer, momentum in zip(wiring.layers, MOMENTA, strict=True):
        scale = torch.rand_like(momentum) + 0.5
        optimizer.state[layer.weight].update(exp_avg=momentum * scale, exp_avg_sq=scale.square())
    return optimizer


@pytest.mark.parametrize("make", [sgd, adam])
def test_prunes_moves_and_grows(make: object) -> None:
    """Half-way through training, the rate is half of 1: each layer loses the weaker 2 of its 4 edges. The first layer
    gets 4 · 3/(3 + 1) = 3 of these 4, and the second gets 1.
    """
    _, wiring = two_layers(SparseMomentum(prune_rate=1.0, every=2, steps=4))
    optimizer = make(wiring)
    wiring.step(optimizer)
    assert all(torch.equal(mask, LEFT) for mask in wiring.masks().values()), "not its turn yet"
    momenta = [next(iter(states(layer, optimizer).values())).clone() for layer in wiring.layers]
    wiring.step(optimizer)
    first, second = wiring.masks().values()
    # The first loses −1 and 2, and grows where momentum is −8, 7 and 5.
    assert first.tolist() == [[True, False, True, True], [False, True, False, True]]
    assert wiring.layers[0].weight.tolist() == [[5, 0, 0, 0], [0, -4, 0, 0]], "new edges start from zero"
    # The second loses 1 and 3, and regains 1 at once, unchanged: momentum is 2 there, and 1 elsewhere.
    assert second.tolist() == [[True, True, False, False], [True, False, False, False]]
    assert wiring.layers[1].weight.tolist() == [[1, 6, 0, 0], [-7, 0, 0, 0]]
    for layer, momentum, new in zip(wiring.layers, momenta, (first & ~LEFT, second & ~LEFT), strict=True):
        now = next(iter(states(layer, optimizer).values()))  # the mean of the gradient is named first
        assert torch.equal(now, momentum.masked_fill(new, 0.0)), "new edges have no momentum, and no others change"
    assert [int(layer.edges.k) for layer in wiring.layers] == [5, 3]
    assert [report.edges for report in wiring.look()] == [5, 3]
    before = [mask.clone() for mask in wiring.masks().values()]
    for _ in range(4):
        wiring.step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(wiring.masks().values(), before, strict=True)), (
        "at the end the rate is 0"
    )


def test_layers_keep_their_numbers_without_redistribution() -> None:
    """Both lose 2 of their 4 edges and grow 2, whatever the momentum of the other layer is."""
    _, wiring = two_layers(SparseMomentum(prune_rate=1.0, every=2, steps=4, redistribute=False))
    optimizer = sgd(wiring)
    for _ in range(2):
        wiring.step(optimizer)
    first, second = wiring.masks().values()
    assert first.tolist() == [[True, False, False, True], [False, True, False, True]]  # −1 and 2 for −8 and 7
    # 1 and 3 are lost and regained at once, unchanged: momentum is largest there, 2 and 1.
    assert second.tolist() == [[True, True, False, False], [True, True, False, False]]
    assert wiring.layers[1].weight.tolist() == [[1, 6, 0, 0], [-7, 3, 0, 0]]
    assert [int(layer.edges.k) for layer in wiring.layers] == [4, 4]


def test_schedule_sets_the_numbers_without_redistribution() -> None:
    model = nn.ModuleList([nn.Linear(10, 7), nn.Linear(7, 3)])
    density = wirings.LinearSchedule(1.0, 0.3, steps=3)
    wiring = wirings.wire_(model, SparseMomentum(every=1, steps=8, redistribute=False), density=density)
    optimizer = sgd(wiring, [torch.randn_like(layer.weight) for layer in wiring.layers])
    for expected in ([53, 16], [37, 11], [21, 6], [21, 6]):  # of 70 and 21, rounded down
        wiring.step(optimizer)
        assert [int(mask.sum()) for mask in wiring.masks().values()] == expected


def test_multiply_adds_are_kept_without_redistribution() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=4))
    budget = {"mult_adds": 0.5, "example_input": torch.randn(1, 3, 8, 8)}
    with pytest.raises(WiringError, match="sparse_momentum"):
        wirings.wire_(model, "sparse_momentum", **budget)
    wiring = wirings.wire_(model, SparseMomentum(every=1, steps=4, redistribute=False), **budget)
    before = [int(layer.edges.k) for layer in wiring.layers]
    wiring.step(sgd(wiring, [torch.randn_like(layer.weight) for layer in wiring.layers]))
    assert [int(mask.sum()) for mask in wiring.masks().values()] == before


def test_no_layer_gets_more_than_it_allows() -> None:
    """The first layer allows 4 edges: after losing 2 it has room for 2 of its share of 3; the second gets 2."""
    allowed = LEFT.clone()
    _, wiring = two_layers(
        SparseMomentum(prune_rate=1.0, every=2, steps=4), density=None, k=8, allowed={"0.weight": allowed}
    )
    for layer in wiring.layers:
        layer.edges.k.fill_(4)
    optimizer = sgd(wiring)
    wiring.step(optimizer)
    wiring.step(optimizer)
    assert [report.edges for report in wiring.look()] == [4, 4]
    first, second = wiring.masks().values()
    assert torch.equal(first, allowed)
    assert second.tolist() == [[True, True, False, False], [True, True, False, False]]


def test_one_layer_keeps_its_number() -> None:
    model = nn.Linear(4, 2, bias=False)
    wiring = wirings.wire_(model, SparseMomentum(prune_rate=1.0, every=2, steps=4), k=4)
    with torch.no_grad():
        wiring.layers[0].weight.copy_(WEIGHTS[0])
        wiring.layers[0].edges.wiring.copy_(LEFT)
    optimizer = sgd(wiring, MOMENTA[:1])
    wiring.step(optimizer)
    wiring.step(optimizer)
    assert wiring.masks()["weight"].tolist() == [[True, False, False, True], [False, True, False, True]]


def test_the_rate_falls_along_half_a_cosine() -> None:
    """800 · (1 + cos(π t)) / 2 of 1,000 edges are lost: 682 after a quarter of training, then 400, 117 and 0."""
    wiring = wirings.wire_(nn.Linear(100, 100, bias=False), SparseMomentum(0.8, every=1), k=1000)
    wiring.plan(4)
    layer = wiring.layers[0]
    optimizer = torch.optim.SGD([layer.weight], lr=0.1, momentum=0.9)
    lost = []
    for _ in range(4):
        with torch.no_grad():
            layer.weight.copy_(torch.rand_like(layer.weight) + 1)  # none is zero
        real = next(iter(wiring.masks().values()))
        # Lost edges do not grow again: momentum is largest elsewhere.
        optimizer.state[layer.weight]["momentum_buffer"] = (torch.rand_like(layer.weight) + 1).masked_fill(real, 0.1)
        wiring.step(optimizer)
        lost.append(1000 - int(layer.weight.count_nonzero()))
    assert lost == [int(800 * (1 + math.cos(math.pi * t / 4)) / 2) for t in (1, 2, 3)] + [0] == [682, 400, 117, 0]


def test_every_is_a_hundredth_of_training_by_default() -> None:
    wiring = wirings.wire_(nn.Linear(100, 100), SparseMomentum(), density=0.1)
    wiring.plan(250)
    layer = wiring.layers[0]
    optimizer = torch.optim.SGD([layer.weight], lr=0.1, momentum=0.9)
    optimizer.state[layer.weight]["momentum_buffer"] = torch.rand_like(layer.weight)
    changed = []
    for step in range(1, 7):
        wiring.step(optimizer)
        if wiring.look()[0].swapped:
            changed.append(step)
    assert changed[0] == 2
    assert set(changed) <= {2, 4, 6}


def test_weight_decay_adds_nothing_to_the_momentum_of_hallucinated_edges() -> None:
    momenta = []
    for decay in (0.0, 0.5):
        torch.manual_seed(0)
        model = nn.Linear(6, 4, bias=False)
        wiring = wirings.wire_(model, SparseMomentum(every=100, seed=0, steps=100), k=8)
        weight, real = wiring.layers[0].weight, wiring.masks()["weight"]
        assert not weight[~real].any()
        optimizer = torch.optim.SGD([weight], lr=0.0, momentum=0.9, weight_decay=decay)
        for _ in range(3):
            model(torch.randn(5, 6)).square().sum().backward()
            optimizer.step()
            wiring.step(optimizer)
        momentum = optimizer.state[weight]["momentum_buffer"]
        assert momentum[~real].all(), "it is fed"
        momenta.append(momentum)
    assert torch.equal(momenta[0][~real], momenta[1][~real])
    assert not torch.equal(momenta[0][real], momenta[1][real])


def test_hallucinated_weights_stay_zero() -> None:
    model = nn.Linear(6, 4)
    wiring = wirings.wire_(model, SparseMomentum(every=2, steps=10), k=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
        wiring.step(optimizer)
        assert not wiring.layers[0].weight[~wiring.masks()["weight"]].any()


def train(model: nn.Module, wiring: wirings.Wiring, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().sum().backward()
        optimizer.step()
        wiring.step(optimizer)


def network(seed: int, density: object = 0.3) -> tuple[nn.Module, wirings.Wiring, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))
    wiring = wirings.wire_(model, SparseMomentum(every=3), density=density)
    wiring.plan(20)
    return model, wiring, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


@pytest.mark.parametrize("density", [0.3, wirings.LinearSchedule(0.6, 0.2, steps=12)], ids=["constant", "schedule"])
def test_resumed_training_continues_identically(density: object) -> None:
    model, wiring, optimizer = network(0, density)
    train(model, wiring, optimizer, 0, 8)
    counts = [int(layer.edges.k) for layer in wiring.layers]
    assert counts != wiring._counts, "some have moved"
    saved = copy.deepcopy((model.state_dict(), wiring.state_dict(), optimizer.state_dict()))

    other, again, its = network(1, density)
    other.load_state_dict(saved[0])
    half_way = pytest.warns(UserWarning, match="its schedule ends with 33") if density != 0.3 else nullcontext()
    with half_way:
        plain = wirings.finalize_(copy.deepcopy(other))  # the numbers of edges come with the model
    assert [int((plain[i].weight != 0).sum()) for i in (0, 2)] == counts
    again.load_state_dict(saved[1])
    its.load_state_dict(saved[2])
    assert [int(layer.edges.k) for layer in again.layers] == counts
    train(model, wiring, optimizer, 8, 20)
    train(other, again, its, 8, 20)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_a_schedule_of_the_density_keeps_the_shares() -> None:
    """From 8 edges, 6 of them in the first layer, to 4 (one each, the rest in proportion), and up again."""
    _, wiring = two_layers(SparseMomentum(every=100, steps=1000))
    first, second = wiring.layers
    with torch.no_grad():
        first.edges.wiring[:, 2] = True
        second.edges.wiring[0, :] = False
        first.weight[:, 2] = torch.tensor([9.0, 8.0])
    first.edges.k.fill_(2)
    second.edges.k.fill_(2)
    wiring.rule.update(wiring.layers, CHANGED, None)
    # 4 − 2 = 2 in proportion to 5 and 1: 1.67 and 0.33, so 2 and 0 in addition to one each.
    assert [int(layer.edges.k) for layer in wiring.layers] == [3, 1]
    assert first.edges.wiring.tolist() == [[True, False, True, False], [False, False, True, False]]  # 5, 9 and 8
    assert second.edges.wiring.tolist() == [[False] * 4, [True, False, False, False]]  # −7
    before = first.edges.wiring.clone()
    first.edges.k.fill_(8)
    second.edges.k.fill_(4)
    wiring.rule.update(wiring.layers, CHANGED, None)  # 12: the first is full, the second has the rest
    assert [int(layer.edges.k) for layer in wiring.layers] == [8, 4]
    assert first.edges.wiring[before].all()
    assert int(second.edges.wiring.sum()) == 4
    assert second.edges.wiring[1, 0]


def test_a_global_budget() -> None:
    _, wiring = two_layers(SparseMomentum(prune_rate=1.0, every=2, steps=4), share="global")
    optimizer = sgd(wiring)
    wiring.step(optimizer)
    wiring.step(optimizer)
    assert [int(mask.sum()) for mask in wiring.masks().values()] == [5, 3]
    assert [int(layer.edges.k) for layer in wiring.layers] == [8, 8]


def test_options_change_something() -> None:
    def result(**settings: object) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(8, 8, bias=False)
        wiring = wirings.wire_(model, SparseMomentum(**{"seed": 0, "every": 2, "steps": 10, **settings}), k=20)
        train(model, wiring, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), 0, 5)
        return model.weight.detach()

    usual = result()
    assert torch.equal(usual, result())
    for settings in ({"prune_rate": 0.1}, {"every": 1}, {"seed": 1}, {"steps": 6}):
        assert not torch.equal(usual, result(**settings)), settings


def test_surplus_grows_elsewhere_in_equal_parts() -> None:
    assert _grown(10, [7.0, 2.0, 1.0], [1, 20, 20]) == [1, 5, 4]  # 7, 2 and 1; a surplus of 6, 3 for each other
    assert _grown(10, [7.0, 2.0, 1.0], [1, 4, 20]) == [1, 4, 5]  # one of which has room for only 2
    assert _grown(10, [7.0, 2.0, 1.0], [9, 9, 9]) == [7, 2, 1]


def test_the_optimizer() -> None:
    _, wiring = two_layers(SparseMomentum(steps=10))
    weights = [layer.weight for layer in wiring.layers]

    def fails(optimizer: torch.optim.Optimizer | None, match: str) -> None:
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        if optimizer is not None:
            optimizer.step()
        wiring.steps = 0
        with pytest.raises(WiringError, match=match):
            wiring.step(optimizer)

    fails(None, r"reads the optimizer's momentum: call wiring.step\(optimizer\)")
    fails(torch.optim.SGD(weights, lr=0.1), r"SGD keeps none for 0.weight: use SGD with momentum, Adam or AdamW")
    fails(torch.optim.Adagrad(weights, lr=0.1), "Adagrad keeps none for 0.weight")
    fails(torch.optim.SGD(weights[:1], lr=0.1, momentum=0.9), "1.weight, which is not among the parameters of the SGD")
    # If fp16's scaler has skipped all steps so far, the rule waits.
    wiring.steps = 0
    wiring.step(torch.optim.SGD(weights, lr=0.1, momentum=0.9))
    # A frozen layer needs no momentum.
    weights[1].requires_grad_(False)
    wiring.steps = 0
    wiring.step(torch.optim.SGD(weights[:1], lr=0.1, momentum=0.9))


def test_half_precision_and_non_finite_momentum() -> None:
    """Edges whose running mean of squares underflows in float16, and training that has diverged."""
    _, wiring = two_layers(SparseMomentum(every=1, steps=10))
    wiring.model.half()
    weights = [layer.weight for layer in wiring.layers]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, eps=1e-4)
    for size in (1e-5, float("nan")):
        for weight in weights:
            weight.grad = torch.full_like(weight, size)
        weights[0].grad.zero_()
        optimizer.step()
        if size == 1e-5:
            wiring.step(optimizer)
            assert sum(report.edges for report in wiring.look()) == sum(wiring._counts)
        else:
            with pytest.raises(WiringError, match=r"the momentum of 1.weight.* is not finite \(nan\).* has diverged"):
                wiring.step(optimizer)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"prune_rate": 1.5}, "sparse_momentum: prune_rate must be a number from 0 to 1, got 1.5"),
        ({"every": 0}, "every must be a whole number, at least 1, got 0"),
        ({"redistribute": "no"}, "redistribute must be true or false, got 'no'"),
    ],
    ids=str,
)
def test_bad_settings(settings: dict[str, object], match: str) -> None:
    with pytest.raises(WiringError, match=match):
        SparseMomentum(**settings)


def test_detects_a_broken_total() -> None:
    _, wiring = two_layers(SparseMomentum(steps=10))
    wiring.layers[0].edges.k.fill_(5)
    with pytest.raises(WiringError, match=r"should have 8 real edges over all layers \(.*\), but it has 9"):
        wiring.look()
    with pytest.raises(WiringError, match=r"should have 8 real edges over all layers \(.*\), but it has 9"):
        wiring.load_state_dict(wiring.state_dict())
