"""Top-KAST: which edges the gradient reaches, and that the others are unchanged."""

import pytest
import torch
from torch import nn

import wirings
from wirings import WiringError, rules
from wirings.rules import TopKAST
from wirings.selection import batched
from wirings.train import recipes

WEIGHT = torch.tensor([[5.0, -1.0, 3.0, 2.0, -4.0]])


def wired(rule: TopKAST, k: int = 1, **settings: object) -> tuple[nn.Linear, wirings.Wiring]:
    model = nn.Linear(5, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(WEIGHT)
    return model, wirings.wire_(model, rule, k=k, **settings)


@pytest.mark.parametrize(
    ("reach", "k", "reached"),
    [
        (0.6, 1, [1, 0, 1, 0, 1]),
        (0.5, 1, [1, 0, 0, 0, 1]),  # 2.5 edges, rounded down to 2
        (0.1, 1, [1, 0, 0, 0, 0]),  # half an edge, rounded down to 0
        (1.0, 1, [1, 1, 1, 1, 1]),
        (0.4, 3, [1, 0, 1, 0, 1]),  # the budget is larger
    ],
)
def test_a_superset_of_the_real_edges_gets_the_gradient(reach: float, k: int, reached: list[int]) -> None:
    model, wiring = wired(TopKAST(reach), k)
    assert int(model.weight.count_nonzero()) == k
    model.weight.sum().backward()
    assert wiring.layers[0].weight.grad.tolist() == [reached]


@pytest.mark.filterwarnings("ignore:share=.global. leaves no edges")
def test_superset_over_all_layers() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[6.0, 5.0], [4.0, 1.0]]))
        model[1].weight.copy_(torch.tensor([[3.0, 2.0]]))
    wiring = wirings.wire_(model, TopKAST(0.67), k=2, share="global")
    for _ in range(2):
        sum(module.weight.sum() for module in model).backward()
    assert [layer.weight.grad.tolist() for layer in wiring.layers] == [[[2, 2], [2, 0]], [[2, 0]]]
    with torch.no_grad():
        wiring.layers[1].weight[0, 1] = 3.5
        wiring.layers[0].weight.grad.zero_()
    sum(module.weight.sum() for module in model).backward()
    assert wiring.layers[1].weight.grad.tolist() == [[2, 1]], "recomputed when a weight has changed"


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_exploration(rate: object) -> None:
    """The density is 1/5: real edges shrink by a twentieth, others within reach by five times that, the rest not."""
    _, wiring = wired(TopKAST(0.6, exploration=0.5))
    optimizer = torch.optim.SGD([wiring.layers[0].weight], lr=rate)
    wiring.step(optimizer)
    torch.testing.assert_close(wiring.layers[0].weight.detach(), torch.tensor([[4.75, -1.0, 2.25, 2.0, -3.0]]))


@pytest.mark.parametrize("name", ["mobilenet-top_kast", "resnet-top_kast-10", "resnet-top_kast-5", "resnet-top_kast-2"])
def test_recipes_shrink_real_edges_as_weight_decay_does(name: str) -> None:
    """Compare with the optimizer's own weight decay, without a gradient, over many steps."""
    settings = recipes.get(f"ste/{name}").settings
    rate, momentum, decay = (getattr(settings.optimizer, what) for what in ("lr", "momentum", "weight_decay"))
    left = []
    for rule, own in ((TopKAST(**settings.rule.options), 0.0), (rules.DNW(), decay)):
        _, wiring = wired(rule)
        weight = wiring.layers[0].weight
        optimizer = torch.optim.SGD([weight], lr=rate, momentum=momentum, weight_decay=own)
        for _ in range(1000):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
            wiring.step(optimizer)
        left.append(float(weight.detach()[0, 0]) / 5)
    assert left[0] == pytest.approx(left[1], rel=0.02)
    assert left[1] < 0.95, "long enough to make a difference"


def test_exploration_never_changes_a_sign() -> None:
    _, wiring = wired(TopKAST(0.6, exploration=100.0))
    wiring.step(torch.optim.SGD([wiring.layers[0].weight], lr=0.1))
    assert wiring.layers[0].weight.tolist() == [[0, -1, 0, 2, 0]]


def test_exploration_of_several_layers_equals_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are chosen all at once, or one by one if one of them has another precision."""

    def shrunk(*dtypes: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [nn.Linear(7, 5, bias=False), nn.Linear(5, 9, bias=False), nn.Linear(9, 3, bias=False)]
        model = nn.ModuleList(layer.to(dtype) for layer, dtype in zip(layers, dtypes, strict=True))
        wiring = wirings.wire_(model, TopKAST(0.6, exploration=0.5), density=0.2)
        wiring.step(torch.optim.SGD(model.parameters(), lr=0.1))
        return [layer.weight.detach().float() for layer in wiring.layers]

    calls = []
    together = batched.kept_of
    monkeypatch.setattr(batched, "kept_of", lambda *args, **kw: calls.append(len(args[0])) or together(*args, **kw))
    at_once = shrunk(*[torch.float32] * 3)
    assert calls == [3, 3]
    one_by_one = shrunk(torch.float32, torch.float32, torch.float64)
    assert calls == [3, 3]
    for ours, theirs in zip(at_once, one_by_one, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_exploration_needs_the_optimizer() -> None:
    model, wiring = wired(TopKAST(exploration=0.1))
    with pytest.raises(
        WiringError, match=r"learning rate: call wiring.step\(optimizer\), or make the rule with exploration=0"
    ):
        wiring.step()
    with pytest.raises(WiringError, match="weight is not among the parameters of the optimizer"):
        wiring.step(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    model.requires_grad_(False)
    wiring.step(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    assert torch.equal(wiring.layers[0].weight, WEIGHT), "weights that are not trained do not shrink"
    wired(TopKAST())[1].step()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"reach": 1.1}, "reach must be"),
        ({"reach": 0.0}, "reach must be above 0, got 0.0; .*'no_update'"),
        ({"exploration": -1}, "exploration"),
    ],
)
def test_mistakes(settings: dict[str, float], says: str) -> None:
    with pytest.raises(WiringError, match=says):
        TopKAST(**settings)
