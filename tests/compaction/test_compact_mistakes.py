"""What cannot be made compact, and how that is told."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wirings import ContinuousGraph, StaticGraph, WiringError, compact
from wirings.compaction import compact as package  # noqa: F401 - the function, not a module of that name
from wirings.compaction.compact import check_outputs
from wirings.graph import ActivationNode


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


def test_a_model_that_cannot_be_traced_says_where_and_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WiringError, match=r"test_compact_mistakes.py:\d+, `if x.sum\(\) > 0:`.*torch.where") as error:
        compact(nn.Sequential(nn.Linear(2, 2), Branching()), torch.randn(1, 2))
    assert "cannot be traced by torch.export" in str(error.value)
    assert "(operator aten." in str(error.value)
    assert capfd.readouterr().err == ""  # PyTorch would print its traces


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("aten::nonzero", lambda x: x[:, x[0].nonzero()[:, 0]]),
        ("aten::_unique2", lambda x: x.unique()[None]),
        ("aten::index.Tensor", lambda x: x * x[x > 0].sum()),
    ],
)
def test_sizes_that_depend_on_values_name_the_operator(name: str, function: Any) -> None:
    with pytest.raises(WiringError, match=rf"operator {name} at .*test_compact_mistakes.py:\d+.*torch.where"):
        compact(Gives(function), torch.randn(4, 3))


def test_no_path_from_input_to_output() -> None:
    graph = StaticGraph([2, 3, 2], node=ActivationNode("relu", bias=True))
    with torch.no_grad():
        graph.weight.zero_()
        graph.weight[0] = 1.0  # from an input to a hidden node that leads nowhere
    with pytest.raises(WiringError, match="no path of edges leads from the input to the output"):
        compact(graph, torch.randn(1, 2))
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    nn.init.zeros_(model[2].weight)
    with pytest.raises(WiringError, match="give it more edges"):
        compact(model, torch.randn(1, 2))


class Gives(nn.Module):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return self.what(x)


def test_other_outputs_and_randomness() -> None:
    with pytest.raises(WiringError, match=r"returned dict. Wrap it"):
        compact(Gives(lambda x: {"y": x}), torch.randn(1, 2))
    with pytest.raises(WiringError, match=r"returned tuple of \(Tensor, tuple\). Wrap it"):
        compact(nn.LSTM(2, 3), torch.randn(1, 2, 2))
    with pytest.raises(
        WiringError, match=r"draws random numbers in evaluation \(aten::(rand|dropout|bernoulli|native)"
    ):
        compact(Gives(lambda x: x * torch.rand(2)), torch.randn(1, 2))
    with pytest.raises(WiringError, match="an output of the model is a constant"):
        compact(Gives(lambda x: (x, torch.ones(2))), torch.randn(1, 2))
    with pytest.raises(WiringError, match="random numbers"):
        compact(Gives(lambda x: F.dropout(x, 0.5, training=True)), torch.randn(1, 2))


def test_outputs_that_are_not_finite() -> None:
    """Infinities are compared, and hide no other difference; where there is nothing else it is told."""
    barred = torch.tensor([0.0, -float("inf"), 0.0])
    model = nn.Sequential(nn.Linear(2, 3), Gives(lambda x: x + barred))
    x = torch.randn(4, 2)
    small = compact(model, x)
    torch.testing.assert_close(small(x), model(x).detach())
    expected = model(x).detach()
    check_outputs(small.program, [expected + 1e-7], [x], [expected], "this")
    with pytest.raises(WiringError, match="the outputs of this differ"):
        check_outputs(small.program, [expected + 1.0], [x], [expected], "this")
    with pytest.raises(WiringError, match="no finite number for the example"):
        compact(Gives(lambda x: (x - x.abs() - 1).log()), x)


def test_outputs_that_are_true_or_false() -> None:
    model = nn.Sequential(nn.Linear(2, 3), Gives(lambda x: x > 0))
    x = torch.randn(4, 2)
    assert torch.equal(compact(model, x)(x), model(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, :, :-1],
        lambda x: x * (1 / x.shape[-1]),
        lambda x: F.avg_pool2d(x, x.shape[-1]),
        lambda x: F.pad(x, (0, -x.shape[-1] % 4, 0, 0)),
        lambda x: x[:, :, : x.shape[2] // 2],
    ],
)
def test_models_that_compute_with_the_size_of_images_hold_for_one(function: Any) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), Gives(function))
    small = compact(model, torch.randn(2, 1, 8, 8))
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(small(x), model(x).detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(WiringError, match=r"hold for that size only: compact the model again"):
        small(torch.randn(1, 1, 12, 12))


def test_arguments() -> None:
    with pytest.raises(WiringError, match=r"takes a torch.nn.Module, not function"):
        compact(lambda x: x, torch.randn(1, 2))  # type: ignore[arg-type, return-value]
    with pytest.raises(WiringError, match="an example of the model's input"):
        compact(nn.Linear(2, 2), (2, 2))  # type: ignore[arg-type]
    with pytest.raises(WiringError, match="no image in it"):
        compact(nn.Linear(2, 2), torch.randn(0, 2))
    with pytest.raises(WiringError, match=r"compact model.float\(\)"):
        compact(nn.Linear(2, 2).bfloat16(), torch.randn(1, 2, dtype=torch.bfloat16))
    with pytest.raises(WiringError, match="takes 1 inputs, but 2 came"):
        compact(nn.Linear(2, 2), torch.randn(1, 2))(torch.randn(1, 2), torch.randn(1, 2))
    with pytest.raises(WiringError, match=r"is \(batch, 2\), but \(1, 3\) came"):
        compact(nn.Linear(2, 2), torch.randn(1, 2))(torch.randn(1, 3))


def test_continuous_graphs() -> None:
    graph = ContinuousGraph(6, inputs=2, outputs=2, edges=12)
    with pytest.raises(WiringError, match="chooses its steps as it goes"):
        compact(graph, torch.randn(1, 2))
    fixed = ContinuousGraph(6, inputs=2, outputs=2, edges=12, solver="rk4", steps=2)
    small = compact(fixed, torch.randn(1, 2))
    x = torch.randn(4, 2)
    torch.testing.assert_close(small(x), fixed(x).detach(), rtol=1e-5, atol=1e-6)


def test_inputs_that_are_whole_numbers_and_several_of_them() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(5, 3), nn.Linear(3, 2)

        def forward(self, words: Tensor, x: Tensor) -> Tensor:
            return self.layer(self.table(words).mean(1) + x)

    model = Two()
    small = compact(model, (torch.randint(5, (2, 4)), torch.randn(2, 3)))
    words, x = torch.randint(5, (3, 4)), torch.randn(3, 3)
    torch.testing.assert_close(small(words, x), model(words, x).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [2, 4])
def test_a_model_that_takes_one_number_of_images_only(count: int) -> None:
    model = Gives(lambda x: x.reshape(count, 2, 3).transpose(1, 2).sin().reshape(count, 6) * 2)
    small = compact(model, torch.randn(count, 6))
    torch.testing.assert_close(small(torch.ones(count, 6)), model(torch.ones(count, 6)))
    with pytest.raises(WiringError, match=f"one number of images only, {count}, but 3 came"):
        small(torch.ones(3, 6))


class Remembers(nn.Module):
    def __init__(self, used: bool) -> None:
        super().__init__()
        self.layer, self.used = nn.Linear(2, 2), used
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x - self.seen) if self.used else self.layer(x)
        self.seen += x.mean(0)
        return y


def test_models_with_a_memory() -> None:
    model, x = Remembers(used=False), torch.randn(3, 2)
    torch.testing.assert_close(compact(model, x)(x), model(x).detach())
    with pytest.raises(WiringError, match="changes its buffer seen in evaluation and computes with it"):
        compact(Remembers(used=True), x)


def test_a_model_that_changes_its_input() -> None:
    model, x = nn.Sequential(Gives(lambda x: x.mul_(2)), nn.Linear(2, 2)), torch.randn(3, 2)
    before = x.clone()
    small = compact(model, x)
    assert torch.equal(x, before)
    torch.testing.assert_close(small(x), model(x.clone()).detach())


def test_the_model_is_left_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    compact(model, torch.randn(4, 2))
    assert model.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
