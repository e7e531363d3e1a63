"""`speed_up_` replaces what measures faster, and nothing else."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernels import on_gpu
from torch import Tensor, nn

import wirings
from wirings import WiringError, models, speed_up_
from wirings.compaction import speed_up
from wirings.compaction.same_outputs import difference
from wirings.compaction.speed_up import SpeedUp, block_side
from wirings.models.gpt import GPTBlock
from wirings.wire.block_products import choose
from wirings.wire.block_products.linear import BlockLinear
from wirings.wire.block_products.tiles import ProductTile


def perceptron(structure: str = "16x16", width: int = 64, **more: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.LayerNorm(width))
    wirings.wire_(model, "random", structure=structure, **({"density": 0.2} if "x" in structure else {}), **more)
    return wirings.finalize_(model).eval()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let a CPU pass for a GPU, on which every call takes the next of these times."""
    times: list[float] = []

    def milliseconds(run: Any) -> float:
        run()
        return times.pop(0)

    monkeypatch.setattr(speed_up, "milliseconds", milliseconds)
    monkeypatch.setattr(speed_up, "DEVICE", "cpu")
    return times


def test_a_cpu_is_told_of_the_engine() -> None:
    model = perceptron()
    before = copy.deepcopy(model.state_dict())
    found = speed_up_(model, (64,))
    assert isinstance(found, SpeedUp)
    assert "wirings.engine.compile(model, example_input)" in str(found)
    assert found.gain == 1.0
    assert type(model[0]) is nn.Linear
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_layers_in_blocks_are_replaced_with_their_activation(gpu: list[float]) -> None:
    #        model, first layer, its GELU, in blocks, second layer, in blocks, model now
    gpu[:] = [1.0, 0.3, 0.1, 0.1, 0.3, 0.15, 0.5]
    model, x = perceptron(), torch.randn(5, 64)
    state, expected = copy.deepcopy(model.state_dict()), model(x)
    found = speed_up_(model, x)
    assert [layer.chosen for layer in found.layers] == ["16x16 + GELU", "16x16"]
    assert isinstance(model[0], BlockLinear)
    assert isinstance(model[1], nn.Identity)
    torch.testing.assert_close(model(x), expected)
    assert found.gain == 2.0
    lines = str(found).splitlines()
    assert "0.4000  0.1000  4.00 times as fast" in " ".join(lines[2].split(" "))
    assert lines[-1] == "model, called: 1.000 ms before, 0.500 ms now, 2.00 times as fast"
    assert list(model.state_dict()) == list(state)  # weights keep their names, and other zeros are found
    other = perceptron()
    with torch.no_grad():
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(model(x), other(x))


def test_what_is_not_faster_stays(gpu: list[float]) -> None:
    model, x = perceptron(), torch.randn(5, 64)
    gpu[:] = [1.0, 0.3, 0.1, 0.4, 0.3, 0.3]
    found = speed_up_(model, x)
    assert [layer.reason for layer in found.layers] == ["16x16 + GELU is no faster", "16x16 is no faster"]
    assert type(model[0]) is nn.Linear
    assert found.note == "No layer is faster with other kernels."


@pytest.mark.parametrize("slower", [True, False])
def test_a_model_that_is_no_faster_is_restored(gpu: list[float], monkeypatch: Any, slower: bool) -> None:
    model, x = perceptron(), torch.randn(5, 64)
    modules, training = list(model.modules()), model.training
    gpu[:] = [1.0, 0.3, 0.1, 0.1, 0.3, 0.15, 1.1 if slower else 0.5]
    differ = "its outputs would differ by more than rounding"
    if not slower:
        monkeypatch.setattr(speed_up, "difference", lambda *_: differ)
    found = speed_up_(model, x)
    why = "it would take 1.100 ms instead of 1.000 ms" if slower else differ
    assert found.note == f"The model is unchanged: {why}."
    reason = "the model as a whole was no faster" if slower else differ
    assert [(layer.chosen, layer.reason) for layer in found.layers] == [("dense", reason)] * 2
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert model.training == training


@pytest.mark.parametrize("structure", ["2:4", "2:4, transposable"])
def test_two_of_four(structure: str, gpu: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda weight: weight.clone())
    model, x = perceptron(structure).bfloat16(), torch.randn(5, 64).bfloat16()
    gpu[:] = [1.0, 0.3, 0.1, 0.1, 0.3, 0.29, 0.5]
    found = speed_up_(model, x)
    assert [layer.chosen for layer in found.layers] == ["2:4", "2:4"]
    assert [layer.chosen_ms for layer in found.layers] == [0.2, 0.29]
    assert not model[0].weight.requires_grad
    assert isinstance(model[1], nn.GELU)


def test_models_of_the_package(gpu: list[float]) -> None:
    """GPT's activation is computed with the layer before it; attention has none."""
    model = models.get("gpt", rule="random", density=0.3, structure="16x16", layers=1, heads=2, width=32, context=8)
    wirings.finalize_(model)
    tokens = torch.randint(256, (2, 8))
    expected = model(tokens)
    gpu[:] = [1.0, *[0.3, 0.1] * 4, 0.3, 0.1, 0.1, 0.3, 0.1, 0.5]
    found = speed_up_(model, tokens)
    assert [layer.chosen for layer in found.layers] == [*["16x16"] * 4, "16x16 + GELU", "16x16", "dense"]
    torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-5)


def in_blocks(net: nn.Module) -> nn.Module:
    wirings.wire_(net, "random", structure="16x16", density=0.3)
    return wirings.finalize_(net).eval()


class Attributes(nn.Module):
    """Two layers and a GELU, which its classes use in ways that nothing but their code shows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(64, 64), nn.Linear(64, 64), nn.GELU()


class Twice(Attributes):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.b(self.act(self.a(x))))


class UsedElsewhere(Attributes):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return y + self.b(self.act(y))


class Branches(Attributes):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.a(x)) if x.sum() > 0 else self.act(self.b(x))


@pytest.mark.parametrize("kind", [Twice, UsedElsewhere, Branches])
def test_gelus_in_unknown_code_stay(gpu: list[float], kind: type[Attributes]) -> None:
    """An example shows one branch of it only."""
    net, x = in_blocks(kind()), torch.rand(8, 64)
    expected = net(x), net(-x)
    gpu[:] = [1.0, *([0.3, 0.1] if kind is Branches else [0.3, 0.1] * 2), 0.5]
    found = speed_up_(net, x)
    assert found.layers[0].chosen == "16x16"
    torch.testing.assert_close((net(x), net(-x)), expected, rtol=1e-4, atol=1e-5)


def test_gelus_of_several_layers_stay(gpu: list[float]) -> None:
    """Those in two containers, of which the example calls one; and those of layers that are in another place too."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            act, layer = nn.GELU(), nn.Linear(64, 64)
            self.first, self.second = (nn.Sequential(nn.Linear(64, 64), act) for _ in range(2))
            self.third, self.layer = nn.Sequential(layer, nn.GELU()), layer

        def forward(self, x: Tensor) -> Tensor:
            return (self.first(x) if x.sum() > 0 else self.second(x)) + self.third(x)

    net, x = in_blocks(Experts()), torch.rand(8, 64)
    expected = net(x), net(-x)
    gpu[:] = [1.0, 0.3, 0.1, 0.3, 0.1, 0.5]
    assert [layer.chosen for layer in speed_up_(net, x).layers] == ["16x16", "dense", "16x16"]
    torch.testing.assert_close((net(x), net(-x)), expected, rtol=1e-4, atol=1e-5)


def test_layers_of_a_sequential_that_are_called_one_by_one(gpu: list[float]) -> None:
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(64, 64), nn.GELU())

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x) + self.mlp[0](x)

    net, x = in_blocks(Sliced()), torch.randn(8, 64)
    gpu[:] = [1.0, 0.3, 0.1, 0.5]
    assert [layer.chosen for layer in speed_up_(net, x).layers] == ["16x16"]


def test_gelus_with_hooks_stay(gpu: list[float]) -> None:
    model, x, calls = perceptron(), torch.randn(5, 64), []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    gpu[:] = [1.0, 0.3, 0.1, 0.3, 0.1, 0.5]
    assert [layer.chosen for layer in speed_up_(model, x).layers] == ["16x16", "16x16"]
    calls.clear()
    model(x)
    assert calls == [1]


def test_subclasses_of_known_blocks_may_have_other_code(gpu: list[float]) -> None:
    class Other(GPTBlock):
        def forward(self, x: Tensor) -> Tensor:
            return self.up(x)[..., :32] + self.down(self.activation(self.up(x)))

    net, x = in_blocks(Other(32, 2, 0.0, True)), torch.randn(2, 4, 32)
    gpu[:] = [1.0, 0.3, 0.1, 0.3, 0.1, 0.5]
    assert [layer.chosen for layer in speed_up_(net, x).layers] == [*["dense"] * 4, "16x16", "16x16"]


def test_a_failure_midway_restores_the_model(gpu: list[float]) -> None:
    model, x = perceptron(), torch.randn(5, 64)
    modules = list(model.modules())
    gpu[:] = [1.0, 0.3, 0.1, 0.1]  # the next timing fails
    with pytest.raises(IndexError):
        speed_up_(model, x)
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))


def test_outputs_that_cannot_be_compared(gpu: list[float]) -> None:
    class Opaque:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = perceptron()

        def forward(self, x: Tensor) -> Opaque:
            return Opaque(self.mlp(x))

    net = Net().eval()
    gpu[:] = [1.0, 0.3, 0.1, 0.1, 0.3, 0.15]
    found = speed_up_(net, torch.randn(5, 64))
    assert found.note == "The model is unchanged: its outputs have no floating-point tensor that can be compared."
    assert type(net.mlp[0]) is nn.Linear


def test_what_counts_as_rounding() -> None:
    @dataclass
    class Output:
        logits: Tensor

    torch.manual_seed(0)
    y = torch.randn(1000)
    far, inf, nan = y.clone(), y.clone(), y.clone()
    far[0], inf[0], nan[0] = 100.0, float("inf"), float("nan")
    differ = "its outputs would differ by more than rounding"
    assert difference(y.bfloat16(), y) == ""
    assert difference(Output(y.bfloat16()), Output(y)) == ""
    assert difference({"a": [inf.bfloat16(), nan]}, {"a": [inf, nan.bfloat16()]}) == ""
    assert difference(1e30 * y.bfloat16(), 1e30 * y) == ""
    assert difference(torch.zeros(3), torch.zeros(3)) == ""
    assert difference(torch.full((2,), float("inf")), torch.full((2,), float("inf"))) == ""
    assert difference(1.1 * y, y) == differ
    shifted = far.clone()
    shifted[1:] += 1.0  # within 5 % of the largest
    assert difference(shifted, far) == differ
    one = y.clone()
    one[7] += 1.0
    assert difference(one, y) == differ
    assert difference(Output(y + 1), Output(y)) == differ
    assert difference(inf, y) == difference(y, inf) == difference(nan, y) == difference(-inf, inf) == differ
    assert difference(y, (y, y)) == difference(y[:5], y) == differ
    assert "no floating-point tensor" in difference(torch.arange(3), torch.arange(3))


@pytest.mark.parametrize("example_input", [torch.randn(2, 65), (65,)])
def test_rejects_examples_that_do_not_fit(example_input: Any) -> None:
    with pytest.raises(WiringError, match=r"speed_up_: Sequential failed on example_input of shape \([12], 65\)"):
        speed_up_(perceptron(), example_input)


def test_wired_models_report_what_they_chose(gpu: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    wiring = wirings.wire_(model, "dnw", structure="16x16", density=0.2)
    key = choose._key("forward none", torch.device("cpu"), torch.float32, (5, 128, 64, 16), 0.2)
    monkeypatch.setitem(choose._found, key, choose.Choice(ProductTile(64), 0.3, 0.1))
    gpu[:] = [1.0]
    found = speed_up_(model, torch.randn(5, 64))
    assert [(layer.chosen, layer.reason) for layer in found.layers] == [
        ("16x16", "3.00 times as fast"),
        ("dense", "no kernels for its inputs"),
    ]
    assert "choose their kernels by themselves" in str(found)
    assert not wiring.ended


def test_blocks_are_recognized() -> None:
    weight = torch.zeros(128, 256)
    assert block_side(weight) is None
    weight[:64, 64:128] = 1
    assert block_side(weight) == 64
    weight[0, 0] = 1
    assert block_side(weight) == 16
    assert block_side(torch.ones(128, 128)) is None
    assert block_side(torch.zeros(24, 16)) is None


def test_rejects_models_it_cannot_change() -> None:
    with pytest.raises(WiringError, match=r"ReLU has no nn\.Linear"):
        speed_up_(nn.ReLU(), torch.randn(2, 2))


@on_gpu
@pytest.mark.parametrize("structure", ["64x64", "2:4"])
def test_on_a_gpu(structure: str) -> None:
    model = perceptron(structure, 2048).cuda().bfloat16()
    x = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16)
    expected = model(x)
    found = speed_up_(model, x)
    print(found)
    torch.testing.assert_close(model(x).float(), expected.float(), rtol=5e-2, atol=5e-2)
    assert found.gain >= 1.0
    if structure == "64x64":
        assert [layer.chosen for layer in found.layers] == ["64x64 + GELU", "64x64"]
        compiled = torch.compile(model)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x).float(), expected.float(), rtol=5e-2, atol=5e-2)
