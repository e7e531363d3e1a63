"""The tiny classifiers of Table 1: their sizes, and that they train with every rule."""

import pytest
import torch
from torch import nn

import wirings
from wirings import WiringError, models, rules
from wirings.graph import StaticGraph

GRAPHS = [name for name in models.names() if name.startswith(("tiny", "digits"))]
EVERY = [(name, rule) for name in GRAPHS for rule in rules.names()]


@pytest.mark.parametrize("name", [n for n in models.names() if n.startswith("tiny")])
def test_has_the_paper_s_41k_parameters(name: str) -> None:
    model = models.get(name)
    assert model.paper_parameters() == {
        "edges": 32_000,
        "nodes": 7_200,
        "stem": 1_248,
        "head": 1_010,
        "total": 41_458,
    }
    assert model.wiring.rule.name == "dnw"
    graph = model.graph
    bound = 800**-0.5
    weight = graph.all_weights()
    assert bound * 0.999 < weight.abs().max() <= bound
    norms = sum(p.numel() for n, p in graph.named_parameters() if "norm" in n)
    assert norms == 1_600
    assert sum(p.numel() for p in graph.parameters()) == graph.allowed + 7_200 + norms
    # The stem: 32 maps of 8 × 8; the head reads rows and columns 2 and 3 of the last 100 nodes' maps.
    x = torch.randn(2, 3, 32, 32)
    assert model.stem(x).shape == (2, 32, 8, 8)
    maps = graph(model.stem(x))
    assert maps.shape == (2, 100, 8, 8)
    changed = maps.detach().clone()
    changed[..., 2:4, 2:4] = 0
    model.graph = nn.Identity()
    model.stem = nn.Identity()
    assert torch.equal(model(changed), model.head.bias.expand(2, 10))


def test_order_of_operations_matches_the_paper() -> None:
    static, discrete = models.get("tiny_static"), models.get("tiny_discrete")
    assert static.graph.functions[1].parts["before"] == ("norm", "activation", "conv")
    assert static.graph.functions[1].parts["after"] == ()
    assert discrete.graph.function.parts["before"] == ("activation", "conv")
    assert discrete.graph.function.parts["after"] == ("norm",)
    assert static.graph.longest_path() == 5
    assert not list(static.graph.functions[-1].parameters())  # output nodes have no function


@pytest.mark.parametrize(("name", "rule"), EVERY)
def test_trains_with_every_rule(name: str, rule: str) -> None:
    torch.manual_seed(0)
    model = models.get(name, rule=rule)
    model.wiring.plan(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.5)  # some rules use the momentum
    x, y = torch.randn(2, *model.input_shape), torch.tensor([1, 7])
    k = sum(report.edges for report in model.wiring.look())
    losses = []
    for _ in range(3):
        torch.manual_seed(1)  # random dropout is the same every time
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.wiring.step(optimizer)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert sum(report.edges for report in model.wiring.look()) == k
    nonzero = int(wirings.finalize_(model).graph.weight.count_nonzero())
    # Edges that grew in the last steps weigh zero until a gradient reaches them, and may lead nowhere.
    assert nonzero == k or (nonzero < k and rule in ("set", "rigl"))
    expected = 200 if name.startswith("digits") else 32_000
    assert k == (model.graph.allowed if rule in ("dense", "keep") else expected)


def test_options_and_mistakes() -> None:
    model = models.get("tiny_static", edges=1000, classes=3)
    assert model.paper_parameters()["edges"] == 1000
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
    assert models.get("tiny_discrete", steps=2).graph.steps == 2
    assert models.get("tiny_continuous", solver="rk4", steps=2).graph.solver == "rk4"
    with pytest.raises(WiringError, match=r"unknown model 'tiny_statc'\. Did you mean 'tiny_static'"):
        models.get("tiny_statc")
    with pytest.raises(WiringError, match=r"unknown option of model 'tiny_discrete': 'stepz'. Did you mean 'steps'"):
        models.get("tiny_discrete", stepz=3)
    with pytest.raises(WiringError, match="32 input nodes"):
        StaticGraph([32, 100])(models.get("tiny_static").stem(torch.zeros(1, 3, 32, 32))[:, :30])
