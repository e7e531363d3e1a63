"""`wire_`, `finalize_` and `unwire_` on every kind of layer, combined with common operations on models."""

import copy
import io
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.autograd import forward_ad

import wirings
from wirings import finalize_, rules, unwire_, wire_
from wirings.selection import shared


class Attention(nn.Module):
    """nn.MultiheadAttention attending to itself; with ``other``, keys of another width (so separate projections)."""

    def __init__(self, other: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, kdim=8, vdim=4 if other else 8)
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x[..., :4] if self.other else x)[0]


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Tied(nn.Module):
    """A language model whose head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(x))))


# model, input, names of the wired weights
MODELS = {
    "linear": (lambda: nn.Linear(6, 5), (3, 6), ["weight"]),
    "bilinear": (lambda: Twice(nn.Bilinear(6, 6, 5)), (3, 6), ["layer.weight"]),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 7), ["weight"]),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 7, 7), ["weight"]),
    "conv3d": (lambda: nn.Conv3d(4, 6, 3), (2, 4, 5, 5, 5), ["weight"]),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 7, 7), ["weight"]),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), (2, 4, 7, 7), ["weight"]),
    "transposed1d": (lambda: nn.ConvTranspose1d(4, 6, 3), (2, 4, 7), ["weight"]),
    "transposed2d": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 7, 7), ["weight"]),
    "transposed3d": (lambda: nn.ConvTranspose3d(4, 6, 3), (2, 4, 5, 5, 5), ["weight"]),
    "rnn": (lambda: Recurrent(nn.RNN(4, 6)), (3, 2, 4), ["layer.weight_ih_l0", "layer.weight_hh_l0"]),
    "gru": (lambda: Recurrent(nn.GRU(4, 6)), (3, 2, 4), ["layer.weight_ih_l0", "layer.weight_hh_l0"]),
    "lstm": (
        lambda: Recurrent(nn.LSTM(4, 6, 2, bidirectional=True, proj_size=3)),
        (3, 2, 4),
        [f"layer.weight_{w}_l{i}{r}" for i in (0, 1) for r in ("", "_reverse") for w in ("ih", "hh", "hr")],
    ),
    "cell": (lambda: Twice(nn.GRUCell(6, 6)), (2, 6), ["layer.weight_ih", "layer.weight_hh"]),
    "attention": (Attention, (2, 5, 8), ["attention.in_proj_weight", "attention.out_proj.weight"]),
    "attention of other widths": (
        lambda: Attention(other=True),
        (2, 5, 8),
        [f"attention.{x}_proj_weight" for x in "qkv"] + ["attention.out_proj.weight"],
    ),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        (2, 5, 8),
        ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"],
    ),
    "tied": (Tied, None, ["embed.weight", "body.weight"]),
}


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)


def example(shape: tuple[int, ...] | None) -> Tensor:
    return torch.randint(20, (2, 5)) if shape is None else torch.randn(shape)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_every_kind_of_layer(kind: str) -> None:
    build, shape, names = MODELS[kind]
    model, x = build(), example(shape)
    plain = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    before = model(x)
    wiring = wire_(model, density=0.4)
    assert sorted(layer.name for layer in wiring.layers) == sorted(names)
    assert {id(p) for p in model.parameters()} == {id(p) for p in parameters.values()}, (
        "an optimizer created before wiring still works"
    )
    assert list(model.state_dict().keys() ^ plain.state_dict().keys()) == []

    model(x).square().mean().backward()
    for layer in wiring.layers:
        hallucinated = ~layer.edges.real(layer.weight)
        assert layer.weight.grad is not None
        assert layer.weight.grad[hallucinated].count_nonzero() > 0, f"the gradient reaches {layer.name}"
    assert not torch.allclose(model(x), before)

    # The same computation by hand: a plain model whose hallucinated edges are set to zero.
    reference = copy.deepcopy(plain)
    with torch.no_grad():
        for name, mask in wiring.masks().items():
            reference.get_parameter(name).mul_(mask)
    torch.testing.assert_close(model(x), reference(x))

    for one in (copy.deepcopy(model), model):  # finalizing a copy does not affect the original
        out = one.eval()(x)
        finalize_(one)
        torch.testing.assert_close(one(x), out, rtol=0, atol=0)
        assert list(one.state_dict()) == list(plain.state_dict())
        assert [n for n, _ in one.named_parameters()] == [n for n, _ in plain.named_parameters()], "in the same order"
    assert {id(p) for p in model.parameters()} == {id(p) for p in parameters.values()}
    assert torch.equal(model.train()(x), model(x))
    pickled = io.BytesIO()
    torch.save(model, pickled)  # whole modules can be pickled again: nothing of the wiring is left
    assert b"wirings" not in pickled.getvalue()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_unwire_restores_all_weights(kind: str) -> None:
    build, shape, _ = MODELS[kind]
    model, x = build(), example(shape)
    before, saved = model(x), copy.deepcopy(model.state_dict())
    wire_(model, density=0.4)
    unwire_(model)
    assert torch.equal(model(x), before)
    for key, value in model.state_dict().items():
        assert torch.equal(value, saved[key])


def test_tied_weights_have_one_wiring() -> None:
    model = Tied()
    wiring = wire_(model, k=60)
    assert sum(int(m.sum()) for m in wiring.masks().values()) == 60
    assert torch.equal(model.embed.weight, model.head.weight)
    model(torch.randint(20, (2, 5))).sum().backward()
    finalize_(model)
    assert model.embed.weight is model.head.weight
    assert int(model.head.weight.count_nonzero()) + int(model.body.weight.count_nonzero()) == 60


def test_norms_biases_and_embeddings_stay_dense() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3), nn.BatchNorm1d(3))
    assert [layer.name for layer in wire_(model, density=0.5).layers] == ["2.weight"]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 4))


@pytest.mark.parametrize(
    ("arguments", "wired"),
    [
        ({}, ["0.weight", "2.0.weight", "3.weight"]),
        ({"skip": ["0", "3"]}, ["2.0.weight"]),
        ({"skip": ["2"]}, ["0.weight", "3.weight"]),  # a module: all in it
        ({"include": ["2*"]}, ["2.0.weight"]),
        ({"include": ["*.weight"], "skip": ["2.*"]}, ["0.weight", "3.weight"]),
    ],
)
def test_patterns(arguments: dict[str, list[str]], wired: list[str]) -> None:
    assert [layer.name for layer in wire_(mlp(), density=0.5, **arguments).layers] == wired


def test_include_reaches_parameters_of_unknown_modules() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix, self.scale = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.ones(4))
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x @ self.matrix * self.scale)

    with pytest.warns(
        UserWarning, match=r"16 of 40 parameters of Own are matrices of layers .* \(matrix\).*include=\["
    ):
        assert [layer.name for layer in wire_(Own(), density=0.5).layers] == ["linear.weight"]
    assert [layer.name for layer in wire_(Own(), density=0.5, skip=["matrix"]).layers] == ["linear.weight"]
    model = Own()
    assert [layer.name for layer in wire_(model, density=0.5, include=["matrix"]).layers] == ["matrix"]
    assert int(model.matrix.count_nonzero()) == 8


def test_allowed_edges_only() -> None:
    model, lower = nn.Linear(6, 6), torch.ones(6, 6).tril().bool()
    wiring = wire_(model, density=0.5, allowed={"weight": lower})
    assert wiring.look()[0].possible == 21
    assert int(model.weight.count_nonzero()) == 10
    model(torch.randn(3, 6)).sum().backward()
    assert not wiring.layers[0].weight.grad[~lower].any()
    assert not finalize_(model).weight[~lower].any()


def test_the_table() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Conv2d(2, 2, 1, groups=2, bias=False))
    wiring = wire_(model, budget={"0": 2, "1": 1})
    with torch.no_grad():
        wiring.layers[0].weight.copy_(torch.tensor([[9.0, 8.0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]))
        wiring.layers[1].weight.copy_(torch.tensor([3.0, 1.0]).view(2, 1, 1, 1))
    wiring.look()
    first, second = wiring.look()
    assert (first.name, first.shape, first.edges, first.density) == ("0.weight", (3, 4), 2, 2 / 12)
    assert (first.swapped, first.without_input, first.without_output) == (0, 2, 2)
    assert (second.without_input, second.without_output) == (1, 1)
    with torch.no_grad():
        wiring.layers[0].weight[1, 2] = 10.0
    text = str(wiring)
    assert str(wiring) == text, "printing changes nothing"
    assert [report.swapped for report in wiring.report()] == [1, 0]
    assert text.splitlines()[2].split() == ["0", "3×4", "2", "16.67", "%", "1", "1", "2"]
    assert text.splitlines()[-2].split() == ["2", "layers", "14", "3", "21.43", "%", "1", "2", "3"]
    assert text.splitlines()[-1] == "not wired: 3 of 17 parameters (17.6 %)"
    assert wiring.look()[0].swapped == 1, "since the last look, not since it was printed"
    assert wiring.look()[0].swapped == 0


@pytest.mark.parametrize("groups", [1, 2])
def test_nodes_of_transposed_convolutions(groups: int) -> None:
    model = nn.ConvTranspose2d(4, 6, 3, groups=groups, bias=False)
    wiring = wire_(model, k=1)
    with torch.no_grad():
        wiring.layers[0].weight[3, 1] = 9.0  # from the last input channel
    report = wiring.look()[0]
    assert (report.without_output, report.without_input) == (3, 5)
    with torch.no_grad():  # one output channel depends on the last input channel
        a, b = model(torch.zeros(1, 4, 5, 5)), model(torch.eye(4)[3].view(1, 4, 1, 1).expand(1, 4, 5, 5))
    assert int((a != b).flatten(2).any(2).sum()) == 1


def test_a_pretrained_model_keeps_its_weights() -> None:
    model = mlp()
    strongest = {
        name: p.detach().abs().flatten().topk(3).indices for name, p in model.named_parameters() if p.dim() > 1
    }
    wiring = wire_(model, budget={"*": 3})
    for name, mask in wiring.masks().items():
        assert sorted(mask.flatten().nonzero().flatten().tolist()) == sorted(strongest[name].tolist())


@pytest.mark.parametrize(
    ("make", "lr"),
    [(torch.optim.SGD, 0.5), (torch.optim.AdamW, 0.02), (torch.optim.Adam, 0.02)],
    ids=["sgd", "adamw", "adam"],
)
def test_optimizers_train_hallucinated_edges(make: type[torch.optim.Optimizer], lr: float) -> None:
    model = mlp()
    optimizer = make(model.parameters(), lr=lr)  # made before
    wiring = wire_(model, density=0.2)
    start = [layer.weight.detach().clone() for layer in wiring.layers]
    x = torch.randn(64, 8)
    y = x[:, :4].argmax(1)
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wiring.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert sum(report.swapped for report in wiring.look()) > 0
    for layer, before in zip(wiring.layers, start, strict=True):
        hallucinated = ~layer.edges.real(layer.weight)
        assert not torch.equal(layer.weight[hallucinated], before[hallucinated])


def test_clipping_leaves_hallucinated_edges_out_of_the_norm() -> None:
    model = mlp()
    wiring = wire_(model, density=0.1)
    (model(torch.randn(32, 8)) * 10).square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    masks = {f"{n.removesuffix('weight')}parametrizations.weight.original": m for n, m in wiring.masks().items()}
    real = torch.cat([(g * masks[n] if n in masks else g).flatten() for n, g in grads.items()]).norm()
    total = torch.cat([g.flatten() for g in grads.values()]).norm()
    norm = wiring.clip_grad_norm_(1.0)
    torch.testing.assert_close(norm, real)
    assert norm < 0.95 * total
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name] / (real + 1e-6))


def test_a_schedule_advances_with_step_and_is_resumed() -> None:
    def build() -> tuple[nn.Module, wirings.Wiring]:
        model = nn.Linear(10, 10)
        return model, wire_(model, density=wirings.CubicSchedule(1.0, 0.1, steps=10, begin=2))

    model, wiring = build()
    counts = []
    for _ in range(14):
        counts.append(int(model.weight.count_nonzero()))
        wiring.step()
    expected = [int(100 * (0.1 + 0.9 * (1 - min(max((t - 2) / 10, 0), 1)) ** 3) + 1e-6) for t in range(14)]
    assert counts == expected
    again, resumed = build()
    resumed.load_state_dict({"rule": "dnw", "steps": 5, "edges": [expected[5]]})
    assert int(again.weight.count_nonzero()) == expected[5]


@pytest.mark.parametrize("share", ["uniform", "global"])
@pytest.mark.parametrize("relative", [False, True])
def test_finalizing_before_a_schedule_has_ended(share: str, relative: bool) -> None:
    model, steps = mlp(), 10
    schedule = wirings.CubicSchedule.over(1.0, 0.25) if relative else wirings.CubicSchedule(1.0, 0.25, steps=steps)
    wiring = wire_(model, density=schedule, share=share)
    if relative:
        wiring.plan(steps)
    all_edges = sum(layer.weight.numel() for layer in wiring.layers)
    early = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=rf"finalized with {all_edges:,} edges, but its schedule ends with 112: .*"):
        finalize_(early)
    for _ in range(steps):
        wiring.step()
    finalize_(model)  # no warning, which would be an error
    assert sum(int(p.count_nonzero()) for p in model.parameters() if p.dim() > 1) == 112


@pytest.mark.filterwarnings("ignore:share=.global. leaves no edges")
def test_global_budget_notices_changes_without_a_new_version() -> None:
    class Holder(nn.Module):  # it has parts, and is never called itself
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    torch.manual_seed(0)
    model = Holder()
    wiring = wire_(model, density=0.2, share="global")
    optimizer = torch.optim.Adam(model.parameters(), 0.01, fused=True)
    before = wiring.masks()
    for _ in range(20):
        optimizer.zero_grad()
        model.second(model.first(torch.randn(16, 8)).relu()).square().mean().backward()
        optimizer.step()
        wiring.step(optimizer)
        used = {f"{name}.weight": getattr(model, name).weight != 0 for name in ("first", "second")}
        assert all(torch.equal(used[name], mask) for name, mask in wiring.masks().items())
    assert any(not torch.equal(before[name], mask) for name, mask in used.items()), "edges were swapped"


def test_a_model_in_ddp_is_wired_before_it_is_wrapped(tmp_path: Path) -> None:
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(mlp())
        for model in (wrapped, nn.Sequential(wrapped)):
            with pytest.raises(wirings.WiringError, match="Wire the model first, then wrap it"):
                wire_(model, density=0.2)
    finally:
        dist.destroy_process_group()


def test_steps_of_a_plain_dnw_change_nothing() -> None:
    model = nn.Linear(10, 10)
    wiring = wire_(model, density=0.1)
    before = model.weight.detach().clone()
    wiring.step()
    assert torch.equal(model.weight, before)
    assert wiring.steps == 1


def test_global_budget_is_one_ranking_over_all_layers() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight.mul_(100)  # strong edges attract the budget to their layer
    with pytest.warns(UserWarning, match=r"leaves no edges in 2 of 3 layers \(2\.0\.weight, 3\.weight\)"):
        wiring = wire_(model, k=100, share="global")
    weights = torch.cat([layer.weight.detach().flatten() for layer in wiring.layers])
    assert torch.equal(torch.cat([m.flatten() for m in wiring.masks().values()]), wirings.choose(weights, 100))
    assert wiring.look()[0].edges == 100
    x = torch.randn(3, 8)
    for touch in (lambda w: w.mul_(1e-4), lambda w: w.data.mul_(1e4)):  # with and without a change of its version
        with torch.no_grad():
            touch(wiring.layers[0].weight)
            model(x)
        weights = torch.cat([layer.weight.detach().flatten() for layer in wiring.layers])
        assert torch.equal(torch.cat([m.flatten() for m in wiring.masks().values()]), wirings.choose(weights, 100))
    other = copy.deepcopy(model)
    torch.testing.assert_close(other(x), model(x))
    assert sum(int(p.count_nonzero()) for n, p in finalize_(other).named_parameters() if p.dim() > 1) == 100
    model(x).sum().backward()
    assert wiring.layers[2].weight.grad.count_nonzero() > 0


def test_under_functional_call_and_ensembles() -> None:
    models = [mlp() for _ in range(3)]
    for model in models:
        wire_(model, density=0.2)
    x = torch.randn(5, 8)
    parameters, buffers = torch.func.stack_module_state(models)
    out = torch.vmap(lambda p, b: torch.func.functional_call(models[0], (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(out, torch.stack([model(x) for model in models]))


@pytest.mark.parametrize("rule", ["dnw", "no_update"])
def test_forward_mode_differentiation_by_weights_is_refused(rule: str) -> None:
    model, x = nn.Linear(6, 4, bias=False), torch.randn(5, 6)
    wire_(model, rule, density=0.5)
    weight = model.parametrizations.weight.original
    with forward_ad.dual_level():
        moved = model(forward_ad.make_dual(x, torch.ones_like(x)))  # by inputs it works
        assert torch.allclose(
            forward_ad.unpack_dual(moved).tangent, nn.functional.linear(torch.ones_like(x), model.weight)
        )
        for given in (weight, weight.detach()):
            dual = {"parametrizations.weight.original": forward_ad.make_dual(given, torch.ones_like(given))}
            with pytest.raises(NotImplementedError, match="forward mode AD"):
                torch.func.functional_call(model, dual, (x,))


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_mixed_precision(precision: torch.dtype) -> None:
    model = mlp()
    wiring = wire_(model, density=0.2)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with torch.autocast("cpu", dtype=precision):
            loss = model(torch.randn(4, 8)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(report.edges == int(0.2 * report.possible) for report in wiring.look())


def test_moving_and_converting_a_wired_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    wiring = wire_(model, "random", density=0.2)
    masks = wiring.masks()
    model.to(torch.bfloat16).to(memory_format=torch.channels_last)
    assert all(torch.equal(wiring.masks()[name], mask) for name, mask in masks.items())
    out = model(torch.randn(1, 3, 8, 8, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_assigning_to_a_wired_weight() -> None:
    model = nn.Linear(3, 2)
    wiring = wire_(model, k=2)
    new = torch.tensor([[1.0, 5.0, 2.0], [3.0, 0.0, 4.0]])
    with torch.no_grad():
        model.weight = new
    assert torch.equal(wiring.layers[0].weight, new)
    assert model.weight.tolist() == [[0.0, 5.0, 0.0], [0.0, 0.0, 4.0]]


def test_assigning_what_was_read_from_a_wired_weight() -> None:
    model = nn.Linear(3, 2)
    wiring = wire_(model, k=2)
    before, read = wiring.layers[0].weight.detach().clone(), model.weight
    with torch.no_grad():
        model.weight = torch.ones(2, 3)
        model.weight = read
        assert torch.equal(wiring.layers[0].weight, before), "hallucinated edges are back, too"
        model.weight = nn.init.constant_(model.weight, 3.0)
        assert wiring.layers[0].weight.tolist() == [[3.0] * 3] * 2
    with torch.inference_mode():
        model.weight = model.weight
    assert wiring.layers[0].weight.tolist() == [[3.0] * 3] * 2


def test_a_seed_makes_the_random_graph_the_same() -> None:
    graphs = []
    for seed in (3, 3, 4, None):
        model = mlp()
        graphs.append(wire_(model, wirings.rules.Random(seed=seed), density=0.5).masks()["2.0.weight"])
    assert torch.equal(graphs[0], graphs[1])
    assert not torch.equal(graphs[0], graphs[2])
    assert not torch.equal(graphs[0], graphs[3])


def test_no_update_swaps_an_edge_in_only_when_a_real_one_shrinks() -> None:
    model = nn.Linear(3, 1, bias=False)
    wiring = wire_(model, "no_update", k=1)
    weight = wiring.layers[0].weight
    with torch.no_grad():
        weight.copy_(torch.tensor([[2.0, 1.0, 0.5]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.tensor([[1.5, 9.0, 9.0]])).sum().backward()
    assert weight.grad.tolist() == [[1.5, 0.0, 0.0]]
    optimizer.step()
    assert model.weight.tolist() == [[0.0, 1.0, 0.0]], "2.0 shrank to 0.5, so 1.0 is the largest"


def test_a_global_budget_is_ranked_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    wire_(model, k=100, share="global")
    calls = []
    once = shared.rank_together
    monkeypatch.setattr(shared, "rank_together", lambda *a: calls.append(1) or once(*a))
    model(torch.randn(3, 8)).sum().backward()
    assert len(calls) == 1
    for parameter in model.parameters():
        parameter.data.mul_(2)  # does not change the version, but the next forward pass ranks again
    model(torch.randn(3, 8))
    assert len(calls) == 2


@pytest.mark.filterwarnings("default")  # the compiler's own deprecations
@pytest.mark.parametrize(("rule", "rankings"), [("dnw", 1), ("soft_threshold", 1), ("top_kast", 2)])
def test_a_compiler_ranks_a_global_budget_once_a_step(rule: str, rankings: int) -> None:
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    wire_(model, rule, k=100, share="global")
    count = 0

    def counted(graph: torch.fx.GraphModule, inputs: object) -> object:
        nonlocal count
        count += sum("wirings.choose" in str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    partition = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=counted, bw_compiler=counted, partition_fn=partition)
    torch._dynamo.reset()
    x = torch.randn(4, 8)
    compiled = torch.compile(model, backend=backend, fullgraph=True)(x)
    compiled.sum().backward()
    assert count == rankings
    torch.testing.assert_close(compiled, model(x))


def test_part_of_a_global_budget_cannot_be_finalized_alone() -> None:
    model = mlp()
    wire_(model, k=100, share="global")
    for call in (finalize_, unwire_):
        with pytest.raises(
            wirings.WiringError, match=r"weight shares one budget with 2\.0\.weight, which is not in this"
        ):
            call(model[0])
    outer = nn.Sequential(model)
    finalize_(outer)
    assert not model._forward_pre_hooks, "nothing of the wiring is left"


def test_functional_call_by_either_names_does_not_change_the_model() -> None:
    model, x = mlp(), torch.randn(3, 8)
    wiring = wire_(model, density=0.2)
    before = [layer.weight.detach().clone() for layer in wiring.layers]
    expected = model(x)
    for state in (model.state_dict(), dict(model.named_parameters())):
        assert torch.equal(torch.func.functional_call(model, state, (x,)), expected)
    halved = {name: value / 2 for name, value in model.state_dict().items()}
    torch.func.functional_call(model, halved, (x,))
    for layer, weight in zip(wiring.layers, before, strict=True):
        assert torch.equal(layer.weight, weight), "hallucinated edges included"


def test_a_budget_by_any_name_of_a_tied_weight() -> None:
    model = Tied()
    wiring = wire_(model, budget={"head": 7, "body": 0.25})
    assert {report.name: report.edges for report in wiring.look()} == {"embed.weight": 7, "body.weight": 16}


def test_a_schedule_by_the_second_name_of_a_tied_weight() -> None:
    wiring = wire_(Tied(), budget={"head": wirings.LinearSchedule(0.5, 0.1, steps=2)})
    for edges in (80, 48, 16, 16):
        assert [report.edges for report in wiring.look()] == [edges]
        wiring.step()


class Fixed(rules.Rule):
    """Chooses only when it is wired and when the budget changes, so that resuming must restore what it remembers."""

    name = "fixed"

    def setup(self, layers: Sequence[rules.LayerLike]) -> None:
        for layer in layers:
            layer.edges.remember("wiring", layer.edges.choose(layer.weight.detach()))

    def update(self, layers: Sequence[rules.LayerLike], training: rules.Training, optimizer: object) -> None:
        if training.budget_changed:
            self.setup(layers)

    def real(self, weight: Tensor, edges: rules.EdgesLike) -> Tensor:
        return edges.wiring


def test_resuming_keeps_what_a_rule_remembers() -> None:
    def build() -> tuple[nn.Module, wirings.Wiring]:
        model = nn.Linear(10, 10)
        return model, wire_(model, Fixed(), density=wirings.LinearSchedule(1.0, 0.5, steps=2))

    model, wiring = build()
    for _ in range(3):
        wiring.step()
    with torch.no_grad():
        wiring.layers[0].weight.neg_().add_(1.0)  # so that a choice made now would be different
    other, resumed = build()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(wiring.state_dict())
    resumed.step()
    assert torch.equal(resumed.masks()["weight"], wiring.masks()["weight"])
    assert torch.equal(other.weight, model.weight)


def test_handle_rejects_a_model_that_is_no_longer_wired() -> None:
    model = mlp()
    wiring = wire_(model, density=0.2)
    finalize_(model)
    assert wiring.ended
    for call in (wiring.look, wiring.masks, wiring.__str__, lambda: wiring.clip_grad_norm_(1.0), wiring.step):
        with pytest.raises(wirings.WiringError, match="no longer wired by this handle"):
            call()
    again = wire_(model, density=0.1)  # a finalized model can be wired again
    assert [report.edges for report in again.look()] == [12, 25, 6]


def test_another_parametrization_on_top_is_not_dropped() -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    model = nn.Linear(4, 4)
    wire_(model, density=0.5)
    nn.utils.parametrize.register_parametrization(model, "weight", Double())
    with pytest.raises(wirings.WiringError, match=r"another parametrization \(Double\) on top"):
        finalize_(model)


def test_masks_are_copies() -> None:
    model, allowed = nn.Linear(4, 4), torch.ones(4, 4).tril().bool()
    wiring = wire_(model, "random", k=3, allowed={"weight": allowed})
    allowed.zero_()
    wiring.masks()["weight"].zero_()
    assert wiring.look()[0].edges == 3
    assert wiring.look()[0].possible == 10


def test_averaged_models() -> None:
    model, x = mlp(), torch.randn(3, 8)
    wiring = wire_(model, "random", density=0.2)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    start = [layer.weight.detach().clone() for layer in wiring.layers]
    with torch.no_grad():
        for layer in wiring.layers:
            layer.weight.add_(1.0)
    for _ in range(2):
        averaged.update_parameters(model)
    held = averaged.module[0].parametrizations.weight
    torch.testing.assert_close(held.original, start[0] + 1.0)
    final = finalize_(averaged.module)
    assert int(final[0].weight.count_nonzero()) == 25
    assert torch.equal(final[0].weight != 0, wiring.masks()["0.weight"])
    assert torch.isfinite(final(x)).all()


@pytest.mark.parametrize("share", ["uniform", "global"])
@pytest.mark.parametrize("rule", ["dnw", "random", "no_update"])
def test_a_schedule_needs_no_recompilation(rule: str, share: str) -> None:
    torch._dynamo.reset()
    model = mlp()
    wiring = wire_(model, rule, density=wirings.LinearSchedule(1.0, 0.2, steps=8), share=share)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled, x = torch.compile(model, backend=counter, fullgraph=True), torch.randn(3, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        out = compiled(x)
        torch.testing.assert_close(out, model(x))
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
        wiring.step()
    assert counter.frame_count == 1
    total = sum(report.possible for report in wiring.look())
    assert abs(sum(report.edges for report in wiring.look()) - 0.2 * total) < 3


def test_state_dict_keeps_the_order_of_keys() -> None:
    for kind in ("conv2d", "lstm", "encoder", "attention of other widths"):
        model = MODELS[kind][0]()
        keys = list(model.state_dict())
        wire_(model, density=0.5)
        assert list(model.state_dict()) == keys


def test_finalizing_holds_one_final_weight_at_a_time() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    class Counts(wirings.rules.Rule):
        name = "counts"

        def real(self, weight: torch.Tensor, edges: wirings.rules.EdgesLike) -> torch.Tensor:
            return edges.choose(weight)

        def forward(self, weight: torch.Tensor, edges: wirings.rules.EdgesLike) -> torch.Tensor:
            nonlocal most
            value = super().forward(weight, edges)
            alive.append(weakref.ref(value))
            most = max(most, sum(ref() is not None for ref in alive))
            return value

    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    wire_(model, Counts(), density=0.25)
    finalize_(model)
    assert most <= 2
    assert [int(layer.weight.count_nonzero()) for layer in model] == [16] * 6


def test_finalizing_a_global_budget_ranks_it_a_few_times_however_many_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for layers in (2, 12):
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
        wiring = wire_(model, density=0.25, share="global")
        expected = wiring.masks()
        calls = []
        whole = shared.rank_together
        monkeypatch.setattr(shared, "rank_together", lambda *a, w=whole, c=calls: c.append(1) or w(*a))
        versions = [layer.weight._version for layer in wiring.layers]
        finalize_(model)
        monkeypatch.undo()
        counts.append(len(calls))
        assert all(torch.equal(model[i].weight != 0, expected[f"{i}.weight"]) for i in range(layers))
        assert all(layer.weight._version > version for layer, version in zip(model, versions, strict=True))
    assert counts[0] == counts[1] <= 2
