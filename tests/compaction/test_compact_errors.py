"""Models that cannot be compacted, and the errors that say so."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wirings import ContinuousGraph, StaticGraph, WiringError, compact, engine, ship
from wirings.compaction import check_outputs
from wirings.graph import ActivationNode


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


def test_untraceable_model_names_the_line_and_the_fix(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WiringError, match=r"test_compact_errors.py:\d+, `if x.sum\(\) > 0:`.*torch.where") as error:
        compact(nn.Sequential(nn.Linear(2, 2), Branching()), torch.randn(1, 2))
    assert "cannot be traced by torch.export" in str(error.value)
    assert "(operator aten." in str(error.value)
    assert capfd.readouterr().err == ""  # PyTorch prints its traces by default


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("aten::nonzero", lambda x: x[:, x[0].nonzero()[:, 0]]),
        ("aten::_unique2", lambda x: x.unique()[None]),
        ("aten::index.Tensor", lambda x: x * x[x > 0].sum()),
    ],
)
def test_data_dependent_sizes_name_the_operator(name: str, function: Any) -> None:
    with pytest.raises(WiringError, match=rf"operator {name} at .*test_compact_errors.py:\d+.*torch.where"):
        compact(Returns(function), torch.randn(4, 3))


def test_no_path_from_input_to_output() -> None:
    graph = StaticGraph([2, 3, 2], node=ActivationNode("relu", bias=True))
    with torch.no_grad():
        graph.weight.zero_()
        graph.weight[0] = 1.0  # from an input to a hidden node without outgoing edges
    with pytest.raises(WiringError, match="no path of edges leads from the input to the output"):
        compact(graph, torch.randn(1, 2))
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    nn.init.zeros_(model[2].weight)
    with pytest.raises(WiringError, match="Give it more edges"):
        compact(model, torch.randn(1, 2))


class Returns(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Dropping(nn.Module):
    """A recurrent layer that drops in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(2, 3, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.train()(x)[0]  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("made", [lambda: nn.Linear(3, 0), lambda: nn.Linear(0, 3), lambda: nn.Conv2d(0, 2, 3)])
def test_layers_without_weights(made: Any) -> None:
    model = made().eval()
    shape = (1, 0, 4, 4) if isinstance(model, nn.Conv2d) else (1, model.in_features)
    model(torch.randn(shape))
    for call in (compact, engine.compile):
        with pytest.raises(WiringError, match=r"the weight of .* so it is empty.*Remove the layer"):
            call(model, torch.randn(shape))


def test_rejects_other_outputs_and_randomness() -> None:
    with pytest.raises(WiringError, match=r"got set. Wrap the model"):
        compact(Returns(lambda x: {x}), torch.randn(1, 2))
    with pytest.raises(WiringError, match=r"got tuple of \(Tensor, str\). Wrap the model"):
        compact(Returns(lambda x: (x, "y")), torch.randn(1, 2))
    with pytest.raises(WiringError, match=r"draws random numbers in evaluation \(aten::lstm"):
        compact(Dropping(), torch.randn(1, 2, 2))
    with pytest.raises(
        WiringError, match=r"draws random numbers in evaluation \(aten::(rand|dropout|bernoulli|native)"
    ):
        compact(Returns(lambda x: x * torch.rand(2)), torch.randn(1, 2))
    with pytest.raises(WiringError, match="an output of the model is constant"):
        compact(Returns(lambda x: (x, torch.ones(2))), torch.randn(1, 2))
    with pytest.raises(WiringError, match="random numbers"):
        compact(Returns(lambda x: F.dropout(x, 0.5, training=True)), torch.randn(1, 2))


def test_infinite_outputs() -> None:
    """Infinities are compared and do not hide other differences; outputs without a finite number raise."""
    mask = torch.tensor([0.0, -float("inf"), 0.0])
    model = nn.Sequential(nn.Linear(2, 3), Returns(lambda x: x + mask))
    x = torch.randn(4, 2)
    small = compact(model, x)
    torch.testing.assert_close(small(x), model(x).detach())
    expected = model(x).detach()
    check_outputs(small.program, [expected + 1e-7], [x], [expected], "this")
    with pytest.raises(WiringError, match="the outputs of this differ"):
        check_outputs(small.program, [expected + 1.0], [x], [expected], "this")
    with pytest.raises(WiringError, match="no finite number for the example"):
        compact(Returns(lambda x: (x - x.abs() - 1).log()), x)


def test_boolean_outputs() -> None:
    model = nn.Sequential(nn.Linear(2, 3), Returns(lambda x: x > 0))
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
def test_models_that_compute_with_the_image_size_are_valid_for_one_size(function: Any) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), Returns(function))
    small = compact(model, torch.randn(2, 1, 8, 8))
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(small(x), model(x).detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(WiringError, match=r"valid for this size only.*compact it again"):
        small(torch.randn(1, 1, 12, 12))


def test_rejects_invalid_arguments() -> None:
    with pytest.raises(WiringError, match=r"expects a torch.nn.Module, got function"):
        compact(lambda x: x, torch.randn(1, 2))  # type: ignore[arg-type, return-value]
    with pytest.raises(WiringError, match="compact needs example_input for Linear: a tensor"):
        compact(nn.Linear(2, 2))
    with pytest.raises(WiringError, match=r"Linear failed on example_input of shape \(1, 3\)"):
        compact(nn.Linear(2, 2), torch.randn(1, 3))
    with pytest.raises(WiringError, match=r"compact expects tensors .* got list for input 1"):
        compact(nn.Linear(2, 2), (torch.randn(1, 2), []))
    with pytest.raises(WiringError, match=r"at least one tensor .* got none"):
        compact(nn.Linear(2, 2), (None,))
    with pytest.raises(WiringError, match="got a tensor without a batch dimension for input 0"):
        compact(nn.Linear(2, 2), torch.tensor(1.0))
    with pytest.raises(WiringError, match="empty batch"):
        compact(nn.Linear(2, 2), torch.randn(0, 2))
    with pytest.raises(WiringError, match=r"Compact model.float\(\)"):
        compact(nn.Linear(2, 2).bfloat16(), torch.randn(1, 2, dtype=torch.bfloat16))
    with pytest.raises(WiringError, match=r"expected 1 inputs \(input\), got 2"):
        compact(nn.Linear(2, 2), torch.randn(1, 2))(torch.randn(1, 2), torch.randn(1, 2))
    with pytest.raises(WiringError, match=r"expects shape \(batch, 2\), got \(1, 3\)"):
        compact(nn.Linear(2, 2), torch.randn(1, 2))(torch.randn(1, 3))


def test_continuous_graphs() -> None:
    graph = ContinuousGraph(6, inputs=2, outputs=2, edges=12)
    with pytest.raises(WiringError, match="adaptive solver"):
        compact(graph, torch.randn(1, 2))
    fixed = ContinuousGraph(6, inputs=2, outputs=2, edges=12, solver="rk4", steps=2)
    small = compact(fixed, torch.randn(1, 2))
    x = torch.randn(4, 2)
    torch.testing.assert_close(small(x), fixed(x).detach(), rtol=1e-5, atol=1e-6)


def test_several_inputs_and_integer_inputs() -> None:
    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(5, 3), nn.Linear(3, 2)

        def forward(self, words: Tensor, x: Tensor) -> Tensor:
            return self.layer(self.table(words).mean(1) + x)

    model = TwoInputs()
    small = compact(model, (torch.randint(5, (2, 4)), torch.randn(2, 3)))
    words, x = torch.randint(5, (3, 4)), torch.randn(3, 3)
    torch.testing.assert_close(small(words, x), model(words, x).detach(), rtol=1e-5, atol=1e-6)


class Masked(nn.Module):
    input_shape = (3,)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        return self.layer(x if mask is None else x * mask) * scale


@pytest.mark.parametrize(
    "example", [torch.randn(2, 3), (3,), [3], None, (torch.randn(2, 3),), {"x": torch.randn(2, 3)}]
)
def test_example_input_in_all_forms(example: Any) -> None:
    model, x = Masked(), torch.randn(5, 3)
    small = compact(model, example)
    torch.testing.assert_close(small(x), model(x).detach(), rtol=1e-5, atol=1e-6)


def test_keyword_inputs() -> None:
    model, x, mask = Masked(), torch.randn(4, 3), (torch.rand(4, 3) < 0.5).float()
    small = compact(model, {"mask": torch.ones(2, 3), "x": torch.randn(2, 3)})
    assert list(small.program.inputs) == ["mask", "x"]
    expected = model(x, mask).detach()
    for found in (small(x=x, mask=mask), small(mask, x=x), small(mask, x)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(WiringError, match=r"expected 2 inputs \(mask, x\), got 1, other"):
        small(mask, other=x)
    with pytest.raises(WiringError, match=r"got list for scale. Wrap the model"):
        compact(model, {"x": x, "scale": [2.0]})


@pytest.mark.parametrize("count", [2, 4])
def test_models_for_one_batch_size(count: int) -> None:
    model = Returns(lambda x: x.reshape(count, 2, 3).transpose(1, 2).sin().reshape(count, 6) * 2)
    small = compact(model, torch.randn(count, 6))
    torch.testing.assert_close(small(torch.ones(count, 6)), model(torch.ones(count, 6)))
    with pytest.raises(WiringError, match=f"batch size of {count}, got a batch of 3"):
        small(torch.ones(3, 6))


class Stateful(nn.Module):
    def __init__(self, used: bool) -> None:
        super().__init__()
        self.layer, self.used = nn.Linear(2, 2), used
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x - self.seen) if self.used else self.layer(x)
        self.seen += x.mean(0)
        return y


def test_models_that_change_buffers() -> None:
    model, x = Stateful(used=False), torch.randn(3, 2)
    torch.testing.assert_close(compact(model, x)(x), model(x).detach())
    with pytest.raises(WiringError, match="changes its buffer seen in evaluation and computes with it"):
        compact(Stateful(used=True), x)


def test_models_that_change_their_input() -> None:
    model, x = nn.Sequential(Returns(lambda x: x.mul_(2)), nn.Linear(2, 2)), torch.randn(3, 2)
    before = x.clone()
    small = compact(model, x)
    assert torch.equal(x, before)
    torch.testing.assert_close(small(x), model(x.clone()).detach())


def test_the_model_is_not_changed() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    compact(model, torch.randn(4, 2))
    assert model.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


class Unshared(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("model", "example", "message"),
    [
        (nn.Linear(3, 2, device="meta"), torch.zeros(1, 3), "weight is on the meta device, without values"),
        (nn.Linear(3, 2), torch.zeros(1, 3, device="meta"), "got one on the meta device"),
        (nn.Linear(3, 2), torch.zeros(1, 3).to_sparse(), "got one of layout torch.sparse_coo"),
        (nn.Linear(3, 2), (10**13,), "does not fit into memory"),
        (nn.Linear(3, 2), (10**30,), "does not fit into memory"),
        (Unshared(), torch.zeros(1, 3), "Unshared cannot be copied, and so not be compacted"),
    ],
)
def test_what_has_no_values_no_room_or_no_copy(model: nn.Module, example: Any, message: str) -> None:
    for function in (compact, engine.compile, ship):
        with pytest.raises(WiringError, match=message):
            function(model, example)


@pytest.mark.parametrize("name", ['x", None); print("run', "x\ny", "x\\", "\x1b[2J"])
@pytest.mark.parametrize("function", [compact, engine.compile, ship])
def test_names_that_could_become_code(name: str, function: Any) -> None:
    """PyTorch writes names of layers into code without escaping them."""
    model = nn.Sequential()
    model.add_module(name, nn.Linear(2, 2))
    with pytest.raises(WiringError, match=r"has quotes, backslashes or control characters. Rename that layer"):
        function(model, torch.randn(1, 2))


@pytest.mark.filterwarnings("ignore")  # PyTorch warns of scripts, and of their copies
@pytest.mark.parametrize("function", [compact, engine.compile, ship])
def test_scripted_parts(function: Any) -> None:
    """Their dictionaries of modules cannot be iterated over."""
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.ReLU())
    with pytest.raises(WiringError, match=r"Sequential cannot be traced by torch\.export"):
        function(model, torch.randn(1, 2))
