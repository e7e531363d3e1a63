"""Experts that one parameter holds as a stack of matrices: each of them is a layer of its own."""

import copy
import json
import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wirings
from wirings import WiringError, rules, wire_
from wirings.history.from_model import WiredWeight, structure_of


class Experts(nn.Module):
    """Two matrices for every expert, as transformers stores them; an input goes to the experts of its index."""

    def __init__(self, experts: int = 3, hidden: int = 4, inner: int = 8, transposed: bool | None = False) -> None:
        super().__init__()
        self.hidden_size = hidden
        if transposed is not None:
            self.is_transposed = transposed
        self.flipped = transposed is not False
        shapes = [(experts, inner, hidden), (experts, hidden, inner)]
        up, down = [(a, c, b) if self.flipped else (a, b, c) for a, b, c in shapes]
        self.up_proj = nn.Parameter(torch.randn(up) / 2)
        self.down_proj = nn.Parameter(torch.randn(down) / 2)
        self.bias = nn.Parameter(torch.zeros(experts, hidden))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i in range(len(self.bias)):
            here = (index == i).any(1)
            up, down = self.up_proj[i], self.down_proj[i]  # read anew for every expert
            up, down = (up.t(), down.t()) if self.flipped else (up, down)
            out[here] += nn.functional.linear(nn.functional.linear(x[here], up).relu(), down) + self.bias[i]
        return out


class Model(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.experts = nn.Linear(4, 4), Experts(**options)  # type: ignore[arg-type]

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return self.experts(self.first(x), index)


X, INDEX = torch.randn(5, 4), torch.tensor([[0, 1], [1, 2], [1, 0], [2, 1], [1, 0]])
NAMES = ["first.weight", "experts.up_proj", "experts.down_proj"]


def test_stacks_are_wired_by_default_with_the_budget_of_their_matrices() -> None:
    model = Model()
    wiring = wire_(model, density=0.25)
    assert [layer.name for layer in wiring.layers] == NAMES
    assert [report.edges for report in wiring.report()] == [4, 24, 24]
    assert "not wired: 16 of 224 parameters (7.1 %)" in str(wiring)
    wirings.finalize_(model)
    assert [int(w.count_nonzero()) for w in (model.experts.up_proj, model.experts.down_proj)] == [24, 24]


class TopKRouter(nn.Linear):
    """A router that is a linear layer, as in Llama 4."""


class RouterOfLayers(nn.Module):
    """A router that holds a linear layer, as in Switch Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(4, 3)


class Mixture(nn.Module):
    """Experts and routers of every form. Other layers may be called ``gate``, too."""

    def __init__(self, router: nn.Module | None = None, gate: nn.Module | None = None) -> None:
        super().__init__()
        self.experts, self.mlp = Experts(), nn.ModuleDict({"gate": nn.Linear(4, 4)})
        self.router, self.gate = router, gate


@pytest.mark.parametrize(
    "model",
    [
        Mixture(TopKRouter(4, 3)),
        Mixture(RouterOfLayers()),
        Mixture(gate=nn.Linear(4, 3)),
        Mixture(nn.Linear(4, 3)),
    ],
)
def test_routers_stay_dense_unless_they_are_included(model: Mixture) -> None:
    wanted = ["experts.up_proj", "experts.down_proj", "mlp.gate.weight"]
    model = nn.Sequential(model)  # type: ignore[assignment]
    assert [layer.name for layer in wire_(copy.deepcopy(model), density=0.25).layers] == [f"0.{n}" for n in wanted]
    routers = [name for name, p in model.named_parameters() if p.shape == (3, 4)]
    assert [layer.name for layer in wire_(model, density=0.25, include=routers).layers] == routers


def test_a_model_that_is_called_a_router_is_wired() -> None:
    class RouterModel(nn.Sequential):
        pass

    assert len(wire_(RouterModel(nn.Linear(4, 4)), density=0.25).layers) == 1
    assert len(wire_(TopKRouter(4, 3), density=0.25).layers) == 1


class MixtureOfExpertsViT(nn.Module):
    """Parameters of three dimensions that are no experts, in a class whose name says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.randn(1, 65, 64))
        self.type_embed = nn.Parameter(torch.randn(1, 2, 64))
        self.queries = nn.Parameter(torch.randn(5, 8, 64))
        self.block = Experts()


@pytest.mark.filterwarnings("ignore:.*parameters of MixtureOfExpertsViT are matrices")
def test_other_parameters_of_three_dimensions_are_no_experts() -> None:
    wiring = wire_(MixtureOfExpertsViT(), density=0.25)
    assert [layer.name for layer in wiring.layers] == ["block.up_proj", "block.down_proj"]
    with pytest.warns(UserWarning, match=r"layers that wirings does not know \(pos_embed, type_embed, queries\)"):
        wire_(MixtureOfExpertsViT(), density=0.25)


def test_stacks_are_known_by_their_name_or_by_each_other() -> None:
    class ParallelExperts(nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            for name in names:
                self.register_parameter(name, nn.Parameter(torch.randn(3, 4, 8)))
            self.scale = nn.Parameter(torch.ones(2, 4, 4))

    for names in (["weight"], ["down_proj"], ["into", "out_of"]):
        wiring = wire_(ParallelExperts(*names), density=0.25, skip=["scale"])
        assert [layer.name for layer in wiring.layers] == names
        assert [layer.receivers().shape for layer in wiring.layers] == [(3, 4, 1)] * len(names)
    with pytest.raises(WiringError, match="no"):
        wire_(ParallelExperts("table"), density=0.25)


def test_erk_sees_the_matrix_of_one_expert() -> None:
    """Densities are in proportion to (4 + 4) / 16 and (8 + 4) / 32, as for 3 + 3 layers of 8 × 4."""
    stacked = [report.edges for report in wire_(Model(), k=80, share="erk").report()]
    alone = nn.ModuleList([nn.Linear(4, 4), *(nn.Linear(4, 8) for _ in range(3)), *(nn.Linear(8, 4) for _ in range(3))])
    separate = [report.edges for report in wire_(alone, k=80, share="erk").report()]
    assert stacked[0] == separate[0]
    assert stacked[1:] == [sum(separate[1:4]), sum(separate[4:])]


@pytest.mark.parametrize("transposed", [False, True, None], ids=["out in", "in out", "in out, by its sizes"])
def test_nodes_belong_to_one_expert(transposed: bool | None) -> None:
    model = Model(transposed=transposed)
    wiring = wire_(model, k=6, include=["experts.up_proj"])
    layer = wiring.layers[0]
    weight = layer.weight.detach().zero_()
    matrices = weight.transpose(1, 2) if transposed is not False else weight  # (experts, out, in)
    for place in [(0, 0, 0), (0, 0, 1), (0, 7, 1), (2, 3, 0), (2, 3, 1), (2, 3, 2)]:
        matrices[place] = 1.0
    (report,) = wiring.report()
    assert report.without_input == 24 - 3, "of 3 × 8 nodes, 0 and 7 of the first and 3 of the last expert have inputs"
    assert report.without_output == 12 - 5, "of 3 × 4 nodes, 0 and 1 of the first and 0, 1, 2 of the last are used"
    receivers = layer.receivers().expand(weight.shape)
    nodes = receivers.transpose(1, 2) if transposed is not False else receivers
    assert nodes[0, :, 0].tolist() == list(range(8))
    assert nodes[2, :, 3].tolist() == list(range(16, 24))


@pytest.mark.parametrize("transposed", [False, True])
def test_nm_keeps_n_of_m_inputs_of_every_node_of_every_expert(transposed: bool) -> None:
    model = Model(transposed=transposed)
    masks = wire_(model, structure="1:4", include=["experts"]).masks()
    for name, inputs in (("experts.up_proj", 4), ("experts.down_proj", 8)):
        mask = masks[name].transpose(1, 2) if transposed else masks[name]
        assert mask.unflatten(2, (inputs // 4, 4)).sum(3).eq(1).all()
    with pytest.raises(
        WiringError, match=r"experts\.up_proj of shape \(3, 8, 4\) has 4 inputs, which is not a multiple"
    ):
        wire_(Model(), structure="1:8", include=["experts"])


def test_expander_gives_every_node_of_every_expert_equally_many_edges() -> None:
    mask = wire_(Model(), "expander", density=0.5, include=["experts"]).masks()["experts.down_proj"]
    assert mask.sum(2).tolist() == [[4] * 4] * 3


@pytest.mark.filterwarnings("ignore:.*had not removed the others yet")
@pytest.mark.parametrize("rule", rules.names())
def test_every_rule_wires_stacks(rule: str) -> None:
    model, made = Model(), rules.get(rule)
    wiring = wire_(model, made, **({} if made.own_budget else {"density": 0.25}))
    wiring.plan(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(X, INDEX).square().mean().backward()
        optimizer.step()
        wiring.step(optimizer)
    expected = model.eval()(X, INDEX)
    edges = {report.name: report.edges for report in wiring.report()}
    wirings.finalize_(model)
    torch.testing.assert_close(model(X, INDEX), expected)
    assert all(int(model.get_parameter(name).count_nonzero()) <= count for name, count in edges.items())


def test_the_weight_is_computed_once_in_a_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    wiring = wire_(model, "random", density=0.5)
    calls = []
    forward = rules.Random.forward
    monkeypatch.setattr(rules.Random, "forward", lambda self, *args: calls.append(0) or forward(self, *args))
    model(X, INDEX).sum().backward()
    assert len(calls) == 3, "once for each of the three weights, though experts read theirs three times"
    with torch.no_grad():
        wiring.layers[1].weight.mul_(2)
    assert torch.equal(model.experts.up_proj, wiring.masks()["experts.up_proj"] * wiring.layers[1].weight)


class WaitingExperts(Experts):
    """Waits before its forward pass ends, in threads that need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.leave = threading.Event(), threading.Event()

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        out = super().forward(x, index)
        if not torch.is_grad_enabled():
            self.inside.set()
            self.leave.wait(60)
        return out


def test_experts_that_run_in_another_thread_change_nothing_in_this_one() -> None:
    experts, layer = WaitingExperts(), nn.Linear(4, 4)
    wire_(experts, density=0.25)
    wiring = wire_(layer, density=0.25)
    thread = threading.Thread(target=torch.no_grad()(experts), args=(X, INDEX))
    thread.start()
    try:
        assert experts.inside.wait(60)
        experts(X, INDEX).sum().backward()
        before = layer.weight
        with torch.no_grad():
            wiring.layers[0].weight.mul_(2.0)
        after = layer.weight
    finally:
        experts.leave.set()
        thread.join()
    assert all(p.grad is not None for p in experts.parameters()), "the other thread needs no gradient, this one does"
    assert torch.equal(after, 2.0 * before)


def test_the_gradient_passes_straight_through_to_unselected_edges() -> None:
    plain, model = Model(), Model()
    wiring = wire_(model, density=0.999, include=["experts.down_proj"])  # one edge is not real
    for one in (plain, model):
        one(X, INDEX).sum().backward()
    torch.testing.assert_close(wiring.layers[0].weight.grad, plain.experts.down_proj.grad)


@torch.no_grad()
def test_copies_and_compiled_models_see_the_same_experts() -> None:
    model = Model()
    wire_(model, density=0.25)
    expected = model(X, INDEX)
    copied = copy.deepcopy(model)
    assert torch.equal(torch.compile(model, backend="eager")(X, INDEX), expected)
    assert torch.equal(wirings.finalize_(copied)(X, INDEX), expected)
    assert torch.equal(model(X, INDEX), expected), "finalizing a copy leaves the original wired"
    found = torch.func.functional_call(model, dict(model.named_parameters()), (X, INDEX))
    assert torch.equal(found, expected)


def test_biases_and_vectors_of_experts_stay_dense() -> None:
    model = Model()
    model.experts.gate_bias = nn.Parameter(torch.zeros(3, 2, 4))
    model.experts.scale = nn.Parameter(torch.ones(3, 1, 4))
    assert [layer.name for layer in wire_(model, density=0.25).layers] == NAMES


def test_profile_counts_the_inputs_that_reach_each_expert() -> None:
    model = Model()
    dense = wirings.profile(model, (X, INDEX))
    loads = [3, 5, 2]
    assert dense.row("experts").mult_adds == sum(loads) * (8 * 4 + 4 * 8)
    assert dense.row("experts").params == 3 * 64 + 12
    masks = wire_(model, density=0.25).masks()
    counted = wirings.profile(model, (X, INDEX)).row("experts")
    edges = sum(masks[name].flatten(1).sum(1) for name in NAMES[1:])
    assert counted.edges == int(edges.sum()) == 48
    assert counted.params == 48 + 12
    assert counted.mult_adds == int((edges * torch.tensor(loads)).sum())
    assert counted.dense_params == 3 * 64 + 12
    wirings.finalize_(model)
    assert wirings.profile(model, (X, INDEX)).row("experts") == counted


def test_a_budget_of_multiply_adds_needs_experts_with_equal_numbers_of_inputs() -> None:
    equal = torch.tensor([[0], [1], [2]])
    wiring = wire_(Model(), mult_adds=60, example_input=(X[:3], equal))
    assert sum(report.edges * cost for report, cost in zip(wiring.report(), (3, 1, 1), strict=True)) == 60
    with pytest.raises(WiringError, match=r"experts\.up_proj are not all multiplied equally often.* or experts"):
        wire_(Model(), mult_adds=60, example_input=(X, INDEX))


class Raw(nn.Module):
    """Parameters that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(4, 6))
        self.heads = nn.Parameter(torch.randn(2, 3, 4))
        self.zeros = nn.Parameter(torch.zeros(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.heads @ (x @ self.matrix.t()).t()) + self.zeros.sum()


def test_included_parameters_are_counted() -> None:
    model = Raw()
    wiring = wire_(model, density=0.25, include=["matrix", "heads"])
    assert [(report.edges, report.possible) for report in wiring.report()] == [(6, 24), (6, 24)]
    counted = wirings.profile(model, (6,))
    assert (counted.dense_params, counted.params) == (52, 6 + 6 + 4)
    assert counted.rows[0].edges == 12
    assert "matrix" in counted.notes[0]
    wirings.finalize_(model)
    assert wirings.profile(model, (6,)).rows == counted.rows


def test_an_included_embedding_is_counted() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    wire_(model, density=0.25, include=["0.weight"])
    row = wirings.profile(model, torch.tensor([1, 2])).row("0")
    assert (row.dense_params, row.params, row.edges) == (32, 8, 8)


def test_axes_say_what_dimensions_are() -> None:
    def nodes(axes: dict[str, str]) -> list[list[int]]:
        wiring = wire_(Raw(), density=0.25, include=["matrix", "heads"], axes=axes)
        return [list(layer.receivers().shape) for layer in wiring.layers]

    assert nodes({}) == [[4, 1], [2, 3, 1]]
    assert nodes({"matrix": "in out", "heads": "experts in out"}) == [[1, 6], [2, 1, 4]]
    assert nodes({"heads": "out in kernel"}) == [[4, 1], [2, 1, 1]]
    kernel = wire_(Raw(), k=1, include=["heads"], axes={"heads": "out in kernel"}).report()[0]
    assert (kernel.without_input, kernel.without_output) == (1, 2)
    wiring = wire_(Raw(), "random", density=0.25, include=["heads"], axes={"heads": "experts in out"})
    description = json.loads(json.dumps(wiring.describe()))
    again = wirings.rewire_(Raw(), description, wiring.model.state_dict())
    assert again.layers[0].edges.axes == ("experts", "in", "out")
    with pytest.raises(
        WiringError, match=r"what the 3 dimensions of heads are, one of 'experts out in', .*got 'in out'"
    ):
        nodes({"heads": "in out"})
    with pytest.raises(WiringError, match=r"axes\['head'\] matches no wired layer"):
        nodes({"head": "experts in out"})
    with pytest.raises(WiringError, match=r"axes\['0'\] matches 0\.weight, .* in a Linear, whose dimensions are known"):
        wire_(nn.Sequential(nn.Linear(2, 2)), density=0.5, axes={"0": "in out"})


@pytest.mark.parametrize("transposed", [False, True])
def test_the_history_joins_nodes_of_one_expert(transposed: bool) -> None:
    """Edge (expert 2, out 3, in 1) leads from node 2 · 4 + 1 of the inputs to node 2 · 8 + 3 of the outputs."""
    experts = Experts(transposed=transposed)
    structure = structure_of([WiredWeight("up_proj", experts, "up_proj", experts.up_proj)])
    place = (2, 1, 3) if transposed else (2, 3, 1)
    index = np.ravel_multi_index(place, tuple(experts.up_proj.shape))
    targets, sources = structure.endpoints(np.array([index]))
    assert [targets[0] - structure.groups[1].start, sources[0]] == [19, 9]
