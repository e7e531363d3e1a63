"""`structure=` on neural graphs: every rule, every kind of graph, beside ordinary layers, and by constructor."""

import copy
from typing import Any

import pytest
import torch
from rule_options import OPTIONS
from torch import Tensor, nn

import wirings
from wirings import Blocks, ContinuousGraph, Dag, DiscreteGraph, Graph, StaticGraph, WiringError, models, rules
from wirings.graph import ActivationNode, ConvNode

pytestmark = pytest.mark.filterwarnings("ignore:.*had not removed the others yet", "ignore:share=.global. leaves no")
STRUCTURES = ["2:4", "2x4", "row", "column", "3x3, padded"]
NODES = {"node": ActivationNode("tanh"), "inputs": 4, "outputs": 4}
SPARSE = torch.rand(30, 30, generator=torch.Generator().manual_seed(0)) < 0.1
ACYCLIC = SPARSE.tril(-1) & (torch.arange(30) >= 4)[:, None]  # without edges to the inputs
KINDS: dict[str, Any] = {
    "static": lambda **b: StaticGraph([4, 8, 4, 4], node=ActivationNode("tanh", bias=True), **b),
    "layers": lambda **b: StaticGraph(Blocks([4, 8, 4, 4], reach=1), node=ActivationNode("tanh"), **b),
    "dag": lambda **b: StaticGraph(topology=Dag(48, inputs=4), outputs=4, node=ActivationNode("tanh"), **b),
    "matrix": lambda **b: StaticGraph(topology=ACYCLIC, **NODES, **b),
    "discrete": lambda **b: DiscreteGraph(12, steps=3, **NODES, **b),
    "sparse": lambda **b: DiscreteGraph(topology=SPARSE, steps=3, **NODES, **b),
    "continuous": lambda **b: ContinuousGraph(12, solver="rk4", steps=2, **NODES, **b),
    "adjoint": lambda **b: ContinuousGraph(12, solver="rk4", steps=2, adjoint=True, **NODES, **b),
}  # fmt: skip
FULL = {"static", "layers", "discrete", "continuous", "adjoint"}  # the kinds of which no tile misses edges
FITTING = [
    (kind, structure)
    for kind in KINDS
    for structure in STRUCTURES
    if kind in FULL or structure in ("row", "column", "3x3, padded")
]
TAKING = [name for name in rules.names() if not (rules.get(name).own_budget or rules.get(name).free_only)]
STEPS = 6
each_rule = pytest.mark.parametrize(
    ("rule", "structure"), [(r, s) for r in TAKING for s in STRUCTURES if (r, s) != ("sparse_momentum", "2:4")]
)


def make(kind: str = "static", seed: int = 0) -> tuple[nn.Sequential, Tensor]:
    """A graph between two ordinary layers, and an input."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 4), KINDS[kind](), nn.Linear(4, 8)), torch.randn(6, 8)


def wire(model: nn.Module, rule: str, structure: str, **more: Any) -> wirings.Wiring:
    budget = {} if ":" in structure else {"density": 0.5}
    made = rules.get(rule, **OPTIONS.get(rule, {}), **more.pop("settings", {}))
    wiring = wirings.wire_(model, made, structure=structure, **budget, **more)
    wiring.plan(STEPS)
    return wiring


def train(model: nn.Module, wiring: wirings.Wiring, x: Tensor, steps: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
        wiring.step(optimizer)


def keys_of(graph: Graph, structure: str) -> list[Any]:
    """For each edge, what names its group, derived from the graph's tiles one edge after the other."""
    keys: list[Any] = []
    for number, tile in enumerate(graph.tiles):
        columns = len(tile.sources)
        for i, (target, source) in enumerate(zip(*tile.edge_list(), strict=True)):
            row, column = divmod(i, columns) if tile.places is None else (int(side[i]) for side in tile.places)
            blocks = {"2:4": (number, row, column // 4), "2x4": (number, row // 2, column // 4)}
            blocks["3x3, padded"] = (number, row // 3, column // 3)
            keys.append(
                int(target) if structure == "row" else int(source) if structure == "column" else blocks[structure]
            )
    return keys


def assert_whole(wiring: wirings.Wiring) -> None:
    """Exactly the budget's number of whole groups are real."""
    counts = []
    for layer, mask in zip(wiring.layers, wiring.masks().values(), strict=True):
        if isinstance(layer.module, Graph):
            text = wiring.structure.text  # type: ignore[union-attr]
            members: dict[Any, list[bool]] = {}
            for key, real in zip(keys_of(layer.module, text), mask.tolist(), strict=True):
                members.setdefault(key, []).append(real)
            if ":" in text:
                assert all(sum(own) == 2 for own in members.values())
                counts.append(2)
            else:
                assert all(len(set(own)) == 1 for own in members.values())
                counts.append(sum(own[0] for own in members.values()))
                assert layer.edges.possible == len(members)
        else:
            counts.append(int(layer.edges.count(mask)))
    shared, ks = wiring.layers[0].edges.shared, [int(layer.edges.k) for layer in wiring.layers]
    if shared:
        assert sum(counts) == ks[0] == sum(layer.edges.possible for layer in wiring.layers) // 2
    else:
        halves = [layer.edges.possible // 2 for layer in wiring.layers]
        assert counts == ks
        assert sum(ks) == sum(halves)
        assert ks == halves or wiring.rule.moves_budget
    assert [report.groups for report in wiring.report()] == counts


@each_rule
def test_every_rule_chooses_whole_groups(rule: str, structure: str) -> None:
    model, x = make()
    wiring = wire(model, rule, structure)
    assert_whole(wiring)
    for _ in range(4):
        train(model, wiring, x)
        assert_whole(wiring)
    # Saved and loaded into another model, it continues identically.
    other, _ = make(seed=1)
    again = wire(other, rule, structure)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(wiring.state_dict())
    for one, handle in ((model, wiring), (other, again)):
        torch.manual_seed(5)
        train(one, handle, x, 2)
    assert torch.equal(other.eval()(x), model.eval()(x))
    with torch.no_grad():
        before = model(x)
        wirings.finalize_(model)
        assert torch.equal(model(x), before)


@pytest.mark.parametrize("share", ["global", "scaled", "erk"])
@pytest.mark.parametrize(("rule", "structure"), [(r, s) for r in TAKING for s in ("row", "2x4")])
def test_graphs_share_budgets_with_layers(rule: str, structure: str, share: str) -> None:
    model, x = make()
    wiring = wire(model, rule, structure, share=share)
    total = sum(layer.edges.possible for layer in wiring.layers) // 2
    for _ in range(3):
        train(model, wiring, x)
        assert sum(report.groups or 0 for report in wiring.report()) == total
        if share != "erk":
            assert_whole(wiring)


@pytest.mark.parametrize(("kind", "structure"), FITTING)
@pytest.mark.parametrize("rule", ["dnw", "rigl", "soft_threshold"])
def test_every_kind_of_graph(rule: str, kind: str, structure: str) -> None:
    model, x = make(kind)
    wiring = wire(model, rule, structure, include=["1.weight"])
    assert_whole(wiring)
    train(model, wiring, x, 3)
    assert_whole(wiring)
    mask = wiring.masks()["1.weight"]
    wirings.finalize_(model)
    assert not model[1].weight[~mask].any()


@pytest.mark.parametrize(("kind", "structure"), [one for one in FITTING if one[0] != "continuous"])
def test_the_gradient_passes_straight_through(kind: str, structure: str) -> None:
    """All edges get the gradient that they have in a plain graph in which hallucinated ones weigh zero."""
    model, x = make(kind)
    wiring = wire(model, "dnw", structure, include=["1.weight"])
    plain, _ = make(kind)
    with torch.no_grad():
        plain[1].weight.mul_(wiring.masks()["1.weight"])
    for one in (model, plain):
        one(x).square().mean().backward()
    grad = wiring.layers[0].weight.grad
    assert grad is not None
    torch.testing.assert_close(grad, plain[1].weight.grad)
    assert grad[~wiring.masks()["1.weight"]].any()


@pytest.mark.parametrize(
    ("rule", "kind", "structure"),
    [
        *(("dnw", *one) for one in FITTING if one[0] in ("static", "discrete", "continuous")),
        *(("top_kast", "static", structure) for structure in STRUCTURES),
        ("dnw", "dag", "column"),
    ],
)
def test_compiled_training_equals_eager(rule: str, kind: str, structure: str) -> None:
    torch._dynamo.reset()
    model, x = make(kind)
    wire(model, rule, structure)
    copied = copy.deepcopy(model)
    for one in (model, torch.compile(copied, backend="aot_eager", fullgraph=True)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
    for (name, a), (_, b) in zip(model.named_parameters(), copied.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


@each_rule
def test_a_schedule_leads_to_the_budget(rule: str, structure: str) -> None:
    model, x = make()
    wiring = wire(model, rule, structure, settings={"schedule": {"kind": "linear", "end": 0.5}})
    counts = [sum(report.counted for report in wiring.look())]
    assert counts[0] == sum(layer.edges.possible for layer in wiring.layers)
    for _ in range(4):
        train(model, wiring, x)
        counts.append(sum(report.counted for report in wiring.look()))
    assert counts == sorted(counts, reverse=True)
    assert_whole(wiring)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("rule", ["set", "rigl", "sparse_momentum"])
def test_exchanges_groups(rule: str, structure: str) -> None:
    if (rule, structure) == ("sparse_momentum", "2:4"):
        pytest.skip("refused")
    model, x = make()
    options = {"end": 1.0, "fraction": 0.5} if rule != "sparse_momentum" else {}
    made = rules.get(rule, every=2, seed=1, **options)
    wiring = wirings.wire_(model, made, structure=structure, **({} if ":" in structure else {"density": 0.5}))
    wiring.plan(8)
    first = wiring.masks()["1.weight"]
    train(model, wiring, x, 6)
    assert_whole(wiring)
    last = wiring.masks()["1.weight"]
    assert not torch.equal(first, last)
    assert not wiring.layers[1].weight[~last].any(), "hallucinated edges weigh zero"


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("rule", ["dnw", "gmp", "set", "rigl", "random"])
def test_starts_from_a_sparse_graph(rule: str, structure: str) -> None:
    model, _ = make()
    wirings.finalize_(wire(model, "random", structure).model)
    real = model[1].weight != 0
    with torch.no_grad():
        model[1].weight[real.nonzero()[0]] = 0.0  # its group is real all the same
    wiring = wirings.wire_(model, rule, structure=structure, start="weights")
    mask = wiring.masks()["1.weight"]
    assert int(mask.sum()) == int(real.sum())
    assert int((real & ~mask).sum()) <= (1 if ":" in structure else 0)


@pytest.mark.parametrize("structure", ["2:4", "column", "3x3, padded"])
def test_is_described_restored_and_saved(structure: str, tmp_path: Any) -> None:
    pytest.importorskip("safetensors")
    model, x = make()
    wiring = wire(model, "rigl", structure)
    train(model, wiring, x, 2)
    other, _ = make(seed=1)
    again = wirings.rewire_(other, wiring.describe(), model.state_dict())
    assert again.describe() == wiring.describe()
    assert all(torch.equal(again.masks()[name], mask) for name, mask in wiring.masks().items())
    wirings.save_sparse(model, tmp_path / "model.safetensors")
    third, _ = make(seed=2)
    wire(third, "set", structure)
    wirings.load_sparse(third, tmp_path / "model.safetensors")
    assert torch.equal(third(x), model(x))


def test_allowed_edges() -> None:
    graph = StaticGraph([2, 2, 1])
    allowed = torch.tensor([True, False, False, False, True, True, False, True])
    with torch.no_grad():
        graph.weight.fill_(1.0)
        graph.weight[7] = 2.0
    wiring = wirings.wire_(graph, structure="row", density=0.5, allowed={"weight": allowed})
    assert wiring.layers[0].edges.possible == 2, "a node without an allowed edge has no group"
    assert wiring.masks()["weight"].nonzero().flatten().tolist() == [4, 5, 7]
    assert (wiring.look()[0].edges, wiring.look()[0].possible) == (3, 4)


def test_the_gradient_every_so_many_steps() -> None:
    model, x = make()
    wiring = wirings.wire_(model, structure="2x4", density=0.5, gradient_every=2, include=["1.weight"])
    layer, mask = wiring.layers[0], wiring.masks()["1.weight"]
    model(x).square().mean().backward()
    assert layer.weight.grad[~mask].any()
    layer.weight.grad = None
    wiring.step()
    model(x).square().mean().backward()
    assert not layer.weight.grad[~mask].any()


# ---- budgets, constructors and models -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "edges"),
    [
        ({"structure": "2x4", "edges": 0.3}, 56),  # 7 of 26 blocks of 8
        ({"structure": "2x4", "edges": 63}, 56),
        ({"structure": "2:4"}, 104),
        ({"structure": "2:4", "edges": 0.5}, 104),
        ({"structure": "2:4", "edges": 104}, 104),
        ({"structure": "2:4", "rule": "random"}, 104),
        ({"structure": "row", "edges": 1.0}, 208),
    ],
)
def test_constructors_take_a_structure(given: dict[str, Any], edges: int) -> None:
    graph = StaticGraph([4, 8, 8, 4], **given)
    assert graph.wiring is not None
    assert int(graph.real().sum()) == edges
    assert f"structure='{given['structure']}'" in repr(graph)
    assert repr(eval(repr(graph), {"StaticGraph": StaticGraph})) == repr(graph)


@pytest.mark.parametrize("kind", [k for k in KINDS if k in FULL])
def test_all_constructors_take_a_structure(kind: str) -> None:
    graph = KINDS[kind](structure="2x2", edges=8, rule="random")
    assert graph.wiring.look()[0].groups == 2
    assert "structure" not in repr(KINDS[kind]())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"structure": "2x2"}, "rule 'dnw' needs edges="),
        ({"structure": "2x3", "edges": 0.5}, 'The nearest block that does is "2x2"'),
        ({"structure": "2:4", "edges": 0.2}, "fixes the number of edges: 2 of every 4, a density of 0.5"),
        ({"structure": "row", "edges": 40}, "whole groups of one size: those of weight of shape .* differ, .* density"),
        ({"structure": "2x2", "edges": 3}, "k = 3 edges are fewer than 1 whole group of 4"),
        ({"structure": "2x2", "rule": "dense"}, "chooses its wiring without a budget"),
        ({"structure": "2x2", "rule": "str", "edges": 0.5}, "single edges in a way of its own"),
        ({"structure": "2:4", "rule": "sparse_momentum"}, "moves edges between layers"),
        ({"structure": "2:4, transposable"}, 'for layers with a matrix of weights; .* Use "2:4"'),
        ({"structure": "2y2", "edges": 0.5}, "structure= expects"),
        ({"structure": torch.zeros(2), "edges": 0.5}, "structure= expects"),
    ],
)
def test_constructors_refuse(given: dict[str, Any], says: str) -> None:
    with pytest.raises(WiringError, match=says):
        StaticGraph([4, 8, 8, 4], **given)


def test_multiply_adds_are_those_of_single_edges() -> None:
    graph = StaticGraph([4, 8, 8, 4], node=ConvNode())
    for given in ({"mult_adds": 0.5}, {"mult_adds": 0.5, "density": 0.5}):
        with pytest.raises(WiringError, match="mult_adds"):
            wirings.wire_(graph, structure="2x4", example_input=(4, 5, 5), **given)
    assert type(graph) is StaticGraph


@pytest.mark.parametrize(
    ("name", "options", "share"),
    [
        ("digits_static", {"structure": "2:4", "rule": "random"}, None),
        ("digits_static", {"structure": "2x8"}, None),
        ("digits_static", {"structure": "row", "edges": 0.2}, 0.2),
        ("tiny_static", {"structure": "4x32", "blocks": 2}, None),
        ("tiny_discrete", {"structure": "column", "edges": 0.05}, 0.05),
        ("tiny_continuous", {"structure": "16x16"}, None),
        ("mobilenetv1_dnw", {"rule": "dnw", "structure": "8x8", "width": 0.3}, None),
        ("mobilenetv1_dnw", {"rule": "dnw", "structure": "row", "width": 0.3}, None),
        ("mobilenetv1_dnw", {"rule": "random", "structure": "16x32", "share": "erk", "width": 0.3}, None),
        ("mobilenetv1_dnw", {"rule": "dnw", "structure": "1:4"}, None),
    ],
)
def test_models_take_a_structure(name: str, options: dict[str, Any], share: float | None) -> None:
    wiring = models.get(name, **options).wiring
    assert wiring.structure.text == options["structure"]  # type: ignore[union-attr]
    for layer, report in zip(wiring.layers, wiring.look(), strict=True):  # type: ignore[union-attr]
        assert layer.edges.groups.whole(layer.edges.real(layer.weight), None)  # type: ignore[union-attr]
        assert report.groups > 0
        if share is not None:
            assert report.groups == int(share * layer.edges.possible)


def test_mobilenet_keeps_the_fractions_of_its_width() -> None:
    free = models.get("mobilenetv1_dnw", rule="dnw", width=0.5, small=True).wiring
    blocks = models.get("mobilenetv1_dnw", rule="dnw", width=0.5, small=True, structure="2x8").wiring
    for one, other in zip(free.look(), blocks.look(), strict=True):
        assert one.edges - 16 < other.edges <= one.edges
    with pytest.raises(WiringError, match="needs a rule"):
        models.get("mobilenetv1_dnw", structure="2x8")
