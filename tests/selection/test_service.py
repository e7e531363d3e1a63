"""One selection for all layers of a model equals layer by layer, whatever happens in between. Forced on a CPU."""

import copy
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from kernels import on_gpu
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import wirings
from wirings.selection import batched, passes, shared
from wirings.selection import functional as primitive


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of weights of each batched selection."""
    seen: list[int] = []
    plain = batched.kept_of

    def counted(weights: list[Tensor], *rest: Any, **options: Any) -> Any:
        seen.append(len(weights))
        return plain(weights, *rest, **options)

    monkeypatch.setattr(batched, "kept_of", counted)
    return seen


def network(device: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 5)
    )
    return model.to(device)


def train(model: nn.Module, device: str, steps: int = 5) -> list[float]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(4, 3, 8, 8, device=device), torch.randint(5, (4,), device=device)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("channels_last", [False, True])
def test_batched_training_equals_layer_by_layer(
    device: str, calls: list[int], monkeypatch: pytest.MonkeyPatch, channels_last: bool
) -> None:
    both = []
    for devices in (("cpu", "cuda"), ()):
        monkeypatch.setattr(passes, "DEVICES", devices)
        model = network(device)
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
        wirings.wire_(model, "dnw", density=0.3)
        both.append((train(model, device), model.state_dict()))
    assert calls == [4] * 5  # one selection of all four layers a step
    assert both[0][0] == both[1][0]
    assert all(torch.equal(both[0][1][name], value) for name, value in both[1][1].items())


def test_hallucinated_edges_get_their_gradient(device: str, calls: list[int]) -> None:
    model = network(device)
    mask = torch.rand(5, 64, device=device) < 0.5
    wiring = wirings.wire_(model, "dnw", density=0.2, allowed={"5": mask})
    model(torch.randn(4, 3, 8, 8, device=device)).square().sum().backward()
    assert calls == [4]
    grad, real = wiring.layers[2].weight.grad, wiring.masks()["5.weight"]
    assert grad is not None
    assert (grad[mask & ~real] != 0).any()
    assert not grad[~mask].any()


def test_weight_changed_during_the_pass_is_chosen_again(device: str, calls: list[int]) -> None:
    model = network(device)
    wiring = wirings.wire_(model, "dnw", density=0.2)
    seen = []

    def change(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            wiring.layers[3].weight.neg_()
        seen.append(module)

    model[5].register_forward_pre_hook(change)
    with torch.no_grad():
        ours = model(x := torch.randn(4, 3, 8, 8, device=device))
        wiring.layers[3].weight.neg_()  # the hook turns it back
        together_before = list(calls)
        wirings.finalize_(model)
        assert torch.equal(model[6](model[5](model[:5](x))), ours)
    assert seen
    assert together_before == [4]


def test_budget_changed_during_the_pass_is_respected(device: str) -> None:
    model = network(device)
    wiring = wirings.wire_(model, "dnw", density=0.2)

    def shrink(module: nn.Module, args: Any) -> None:
        wiring.layers[3].edges.k.fill_(1)

    model[2].register_forward_pre_hook(shrink)
    with torch.no_grad():
        y = model(x := torch.randn(1, 3, 8, 8, device=device))
        one = model[6].weight
        assert int(one.count_nonzero()) == 1
        torch.testing.assert_close(y, nn.functional.linear(model[:6](x), one, model[6].bias))


def test_layer_used_alone_or_twice_chooses_by_itself(device: str, calls: list[int]) -> None:
    model = network(device)
    wirings.wire_(model, "dnw", density=0.2)
    assert int(model[6].weight.count_nonzero()) == 5
    assert not calls  # outside a forward pass of the model
    model(torch.randn(1, 3, 8, 8, device=device))
    model[6].parametrizations.weight.original.data.zero_()  # this does not change the version
    model[6].parametrizations.weight.original.data[0] = 1.0
    assert int(model[6].weight[0].count_nonzero()) == 5
    assert calls == [4]


def test_copies_choose_for_themselves(device: str, calls: list[int]) -> None:
    model = network(device)
    wirings.wire_(model, "dnw", density=0.2)
    x = torch.randn(2, 3, 8, 8, device=device)
    expected = model(x)
    replica = copy.deepcopy(model)
    part = copy.deepcopy(model[2])
    calls.clear()
    with torch.no_grad():
        model[6].parametrizations.weight.original.zero_()
        assert torch.equal(replica(x), expected)
        assert part(torch.randn(1, 8, 6, 6, device=device)).shape == (1, 4, 4, 4)
    assert calls == [4]


def test_two_wirings_of_one_model_and_their_hooks(device: str, calls: list[int]) -> None:
    model = network(device)
    wirings.wire_(model, "dnw", density=0.2, include=["0", "2"])
    wirings.wire_(model, "dnw", density=0.5, include=["5", "6"])
    model(torch.randn(1, 3, 8, 8, device=device))
    assert calls == [2, 2]
    wirings.finalize_(model)
    assert not model._forward_pre_hooks


def test_finalizing_a_part_leaves_the_others_wired(device: str, calls: list[int]) -> None:
    model = network(device)
    wiring = wirings.wire_(model, density=0.25)
    x = torch.randn(1, 3, 8, 8, device=device)
    before = model(x)
    wirings.finalize_(model[2])
    assert calls == [4]
    torch.testing.assert_close(model(x), before)
    assert calls == [4, 3]
    assert not wiring.ended
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), before)


def test_layer_left_out_of_a_pass_is_chosen_again_after_a_step(device: str) -> None:
    model = network(device)
    wiring = wirings.wire_(model, density=0.25)
    model[:2](torch.randn(1, 3, 8, 8, device=device))  # the root's hook runs, but only some layers ask
    for hook in model._forward_pre_hooks.values():
        hook(model, ())
    model[0](torch.randn(1, 3, 8, 8, device=device))
    last = wiring.layers[3].weight
    last.data.copy_(last.data.flip(0, 1) + torch.arange(25, device=device).view(5, 5))  # keeps the version
    wiring.step()
    assert torch.equal(model[6].weight != 0, wiring.masks()["6.weight"])


class Losses(nn.Module):
    """A model that is trained by a method, so that its hooks never run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def loss(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).square().mean()


@pytest.mark.parametrize("share", ["uniform", "global", "scaled"])
@pytest.mark.parametrize("rule", ["dnw", "soft_threshold", "top_kast"])
@pytest.mark.parametrize("way", ["fused", "data"])
@pytest.mark.parametrize("at_once", [False, True])
def test_writes_without_a_version_are_seen_without_a_forward_pass(
    rule: str, share: str, way: str, at_once: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "DEVICES", ("cpu", "cuda") if at_once else ())
    torch.manual_seed(0)
    model = Losses().to(device)
    wiring = wirings.wire_(model, rule, density=0.2, share=share)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, fused=True)
    for _ in range(5):
        optimizer.zero_grad()
        model.loss(torch.randn(32, 16, device=device)).backward()
        if way == "fused":
            optimizer.step()
        else:
            for parameter in model.parameters():
                parameter.data -= 0.5 * parameter.grad / parameter.grad.norm()
        used = {f"{name}.weight": model.get_submodule(name).weight != 0 for name in ("first", "last")}
        real = wiring.masks()  # which forgets everything cached
        assert all(torch.equal(used[name], real[name]) for name in used)


def test_shared_ranking_is_made_once_for_a_method(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "DEVICES", ())
    made, plain = [], shared.rank_together
    monkeypatch.setattr(shared, "rank_together", lambda *args: made.append(1) or plain(*args))
    model = Losses().to(device)
    wirings.wire_(model, "dnw", density=0.2, share="global")
    made.clear()
    each = 1 if device == "cpu" else 2  # on a GPU, every layer that asks has all layers ranked
    for count in (1, 2, 3):
        model.loss(torch.randn(2, 16, device=device))
        assert len(made) == each
        model.last(torch.randn(2, 16, device=device))  # nothing has changed
        assert len(made) == (1 if device == "cpu" else 3)
        model.first.parametrizations.weight.original.data += count  # type: ignore[union-attr, operator]
        made.clear()


@pytest.mark.parametrize("share", ["global", "scaled"])
@pytest.mark.parametrize("rule", ["dnw", "soft_threshold", "top_kast"])
@pytest.mark.parametrize("written", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("compares", [True, False])
def test_layers_that_ask_in_turn_see_writes_without_a_version(
    compares: bool, written: tuple[int, ...], rule: str, share: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "DEVICES", ())
    if not compares:  # as on a GPU
        monkeypatch.setattr(shared, "_comparable", lambda weights: False)
    torch.manual_seed(0)
    model = Losses().to(device)
    wiring = wirings.wire_(model, rule, density=0.2, share=share)
    layers = wiring.layers
    twin = copy.deepcopy(model)

    def expected(place: int) -> Tensor:
        twin.load_state_dict(model.state_dict())  # which counts versions
        return twin.get_submodule(("first", "last")[place]).weight  # type: ignore[return-value]

    for place in (0, 1, 1, 0, 1, 0, 0):
        assert torch.equal(layers[place].module.weight, expected(place))  # type: ignore[arg-type]
        for other in written:
            weight = layers[other].weight
            weight.data.copy_(torch.randn_like(weight) * 2 ** float(torch.randn(())))


@pytest.mark.parametrize("where", ["submodule after a pass", "pass after a submodule"])
def test_reading_a_layer_before_and_after_a_pass(where: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "DEVICES", ())
    model = network(device)
    wiring = wirings.wire_(model, "dnw", density=0.2, share="global")
    x = torch.randn(2, 3, 8, 8, device=device)
    parts = [lambda: model(x), lambda: model[6].weight]
    for part in parts if where.startswith("submodule") else parts[::-1]:
        part()
        wiring.layers[0].weight.data.mul_(-3)
    real = model[6].weight != 0
    assert torch.equal(real, wiring.masks()["6.weight"])


@pytest.mark.parametrize("share", ["uniform", "global"])
def test_compiled_submodule_that_the_model_does_not_use(device: str, share: str) -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.apart = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.main(x)

    torch.manual_seed(0)
    model = Auxiliary().to(device)
    wiring = wirings.wire_(model, density=0.25, share=share)
    compiled, apart = (torch.compile(one, backend="aot_eager") for one in (model, model.apart))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    x = torch.randn(3, 8, device=device)
    for _ in range(4):
        compiled(x).square().sum().backward()
        wiring.layers[1].weight.grad = torch.randn(8, 8, device=device)
        optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(apart(x), model.apart(x))


def test_pass_that_another_thread_ends(device: str) -> None:
    class Ended(dict[Any, Any]):
        """Is cleared as soon as it was looked into."""

        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            self.clear()
            return found

    model = network(device)
    wiring = wirings.wire_(model, density=0.25)
    x = torch.randn(2, 3, 8, 8, device=device)
    before = model(x)
    for layer in wiring.layers:
        layer.edges.__dict__["ready"] = Ended()
    torch.testing.assert_close(model(x), before)


def test_recomputing_in_the_backward_pass(device: str) -> None:
    from torch.utils.checkpoint import checkpoint_sequential

    grads = []
    for again in (False, True):
        model = network(device)
        wiring = wirings.wire_(model, "dnw", density=0.2)
        x = torch.linspace(-1, 1, 2 * 3 * 8 * 8, device=device).view(2, 3, 8, 8)
        y = checkpoint_sequential(model, 2, x, use_reentrant=False) if again else model(x)
        y.square().sum().backward()
        grads.append([layer.weight.grad for layer in wiring.layers])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_layers_of_several_dtypes(device: str, calls: list[int]) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6).double(), nn.Linear(6, 6).double())
    wiring = wirings.wire_(model.to(device), "dnw", density=0.5)
    model[:2](torch.randn(2, 6, device=device))
    assert not calls  # outside a forward pass of the model
    model.forward = lambda x: model[2:](model[:2](x).double())  # type: ignore[method-assign]
    out = model(torch.randn(2, 6, device=device))
    assert out.dtype == torch.float64
    assert calls == [2, 2]  # once for each dtype
    assert all(int((layer.module.weight != 0).sum()) == 18 for layer in wiring.layers)


class Own(nn.Module):
    """A custom module, for which a compiler runs hooks outside of its graph."""

    def __init__(self, spare: bool = False) -> None:
        super().__init__()
        self.body = network("cpu")
        self.spare = nn.Linear(5, 5) if spare else None

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("kind", ["sequential", "own", "with a layer that is not used"])
def test_compiled_steps_choose_once(device: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[int, int]] = []

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        targets = [str(node.target) for node in graph.graph.nodes]
        chosen.append((targets.count("wirings.kept_of.default"), targets.count("wirings.real_edges.default")))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    losses = []
    for way in ("compiled", "called", "alone"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        monkeypatch.setattr(passes, "DEVICES", ("cpu", "cuda") if way != "alone" else ())
        model = (network("cpu") if kind == "sequential" else Own(spare="not used" in kind)).to(device)
        wiring = wirings.wire_(model, "dnw", density=0.3)
        losses.append(train(torch.compile(model, backend=backend) if way == "compiled" else model, device))
        assert all(kept is None for kept in wiring.layers[0].edges.selection._traced)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[1] == losses[2]
    many, alone = (sum(column) for column in zip(*chosen, strict=True))
    assert many == 1
    assert bool(alone) == ("not used" in kind)  # from its second pass on


def test_compiler_reads_each_weight_from_the_shared_row(device: str) -> None:
    torch.manual_seed(0)
    shapes = [(8, 3, 3, 3), (16, 8, 1, 1), (16, 8), (20,), (1, 5), (4, 1, 3)]
    weights = [torch.randn(shape, device=device) for shape in shapes]
    weights[:2] = [weight.to(memory_format=torch.channels_last) for weight in weights[:2]]
    weights.append(torch.randn(9, 7, device=device).t())
    ks = [torch.tensor(weight.numel() // 3, device=device) for weight in weights]

    def doubled(*weights: Tensor) -> list[Tensor]:
        return [kept * 2 for kept in batched.kept_of(weights, ks, [None] * len(weights))[0]]

    torch._dynamo.reset()
    for weight, k, got in zip(weights, ks, torch.compile(doubled)(*weights), strict=True):
        assert torch.equal(got, 2 * primitive.real_edges(weight, k))


@on_gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_compiled_steps_are_right_on_a_gpu() -> None:
    both = []
    for compiled in (False, True):
        model = network("cuda")
        wirings.wire_(model, "dnw", density=0.3)
        both.append(train(torch.compile(model) if compiled else model, "cuda"))
    assert both[0] == pytest.approx(both[1], rel=1e-3)
