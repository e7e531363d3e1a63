"""Recurrent layers: counted, pruned, stored in files and exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wirings import WiringError, compact, engine, load_compact, profile
from wirings.compaction.check_program import check_program
from wirings.compaction.operations import Recurrent, TorchOperator
from wirings.compaction.program import Program

LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "two lstms in both directions": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "gru without biases": (nn.GRU, {"bias": False}),
    "two grus": (nn.GRU, {"num_layers": 2}),
    "rnn": (nn.RNN, {}),
    "rnn with relu in both directions": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
}


class Tagger(nn.Module):
    """A recurrent layer over tokens, and a score for each of them."""

    def __init__(self, layer: Any, **options: Any) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(11, 6), layer(6, 5, **options)
        self.first = self.layer.batch_first
        self.out = nn.Linear(10 if self.layer.bidirectional else 5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        found = self.layer(x if self.first else x.transpose(0, 1))[0]
        return self.out(found if self.first else found.transpose(0, 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers(name: str, first: bool, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    layer, options = LAYERS[name]
    model = Tagger(layer, batch_first=first, **options).eval()
    ids = torch.randint(11, (1, 7))
    small = compact(model, ids)
    assert not any(isinstance(o, TorchOperator) for o in small.program.operations)
    assert small.report is not None
    assert small.report.uncounted == ()
    assert small.report.before.mult_adds == profile(model, ids).mult_adds
    more = torch.randint(11, (3, 7))
    with torch.no_grad():
        expected = model(more)
    torch.testing.assert_close(small(more), expected)
    again = load_compact(small.save(tmp_path / "model.safetensors"))
    assert torch.equal(again(more), small(more))
    for kind in ("onnx", "pt2"):
        assert small.save(tmp_path / f"model.{kind}").exists()  # compares the outputs
    torch.testing.assert_close(engine.compile(small, engine="sparse")(more), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_units_that_nothing_needs_are_removed(layer: Any) -> None:
    torch.manual_seed(0)
    model = Tagger(layer, batch_first=True).eval()
    with torch.no_grad():
        model.out.weight[:, 1:] = 0
        recurrent = model.layer.weight_hh_l0.view(-1, 5, 5)
        recurrent[:] = 0
        recurrent[:, 0, 2] = 0.5  # the first unit reads the third, which reads itself
        recurrent[:, 2, 2] = 0.7
        model.layer.weight_ih_l0[:, 4] = 0
    ids = torch.randint(11, (2, 7))
    small = compact(model, ids)
    (made,) = (o for o in small.program.operations if isinstance(o, Recurrent))
    assert made.units == 2
    assert made.weight.shape[1] == 5
    torch.testing.assert_close(small(ids), model(ids).detach())


class Last(nn.Module):
    """The last states, after states to begin with that depend on the input."""

    def __init__(self, layer: Any, start: bool, **options: Any) -> None:
        super().__init__()
        self.layer, self.start = layer(4, 6, batch_first=True, **options), start
        self.into, self.out = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.into(x[:, 0])[None] if self.start else None
        if self.start and isinstance(self.layer, nn.LSTM):
            first = first, first.tanh()
        found, last = self.layer(x, first)
        return self.out(last[1][-1] if isinstance(last, tuple) else last[-1] + found[:, 0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_states_before_and_after(layer: Any, start: bool, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, x = Last(layer, start).eval(), torch.randn(2, 5, 4)
    with torch.no_grad():
        model.out.weight[:, 3:] = 0
        model.layer.weight_hh_l0.view(-1, 6, 6)[:, :3, 3:] = 0
    small = compact(model, x)
    (made,) = (o for o in small.program.operations if isinstance(o, Recurrent))
    assert made.units == 3
    assert not any(isinstance(o, TorchOperator) for o in small.program.operations)
    torch.testing.assert_close(small(x), model(x).detach())
    again = load_compact(small.save(tmp_path / "model.safetensors"))
    assert torch.equal(again(x), small(x))
    for kind in ("onnx", "pt2"):
        assert small.save(tmp_path / f"model.{kind}").exists()
    fast = engine.compile(small, engine="dense", threads=2)
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_projections_and_learned_states_stay_on_pytorch() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.state = nn.GRU(4, 4, batch_first=True), nn.Parameter(torch.randn(1, 1, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, self.state.expand(1, x.shape[0], 4).contiguous())[0]  # type: ignore[no-any-return]

    for model in (Learned().eval(), Tagger(nn.LSTM, batch_first=True, proj_size=2).layer):
        x = torch.randn(2, 5, 4 if isinstance(model, Learned) else 6)
        plain = model if isinstance(model, Learned) else First(model)
        small = compact(plain, x)
        assert not any(isinstance(o, Recurrent) for o in small.program.operations)
        assert small.report is not None
        assert [name.partition(".")[0] for name in small.report.uncounted] in (["aten::gru"], ["aten::lstm"])
        torch.testing.assert_close(small(x), plain(x).detach())


class First(nn.Module):
    """The first result of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "lstms"}, "a layer among lstm"),
        ({"weight": torch.randn(8, 2)}, "a tensor of size"),
        ({"recurrent": torch.randn(8, 3)}, "a tensor of size"),
        ({"bias": torch.randn(8)}, "two biases or none"),
        ({"kind": "rnn_relu", "cell": True}, "an LSTM, for cells"),
        ({"bias": torch.randn(8), "recurrent_bias": torch.randn(7)}, "a tensor of size"),
    ],
)
def test_invalid_fields_in_files(changes: dict[str, Any], message: str) -> None:
    fields = {"weight": torch.randn(8, 3), "recurrent": torch.randn(8, 2), **changes}
    with pytest.raises(WiringError, match=message):
        check_program(Program({"x": (3, 5)}, [Recurrent("y", ("x",), **fields)], ("y",)), 2**30)


@pytest.mark.parametrize(("states", "message"), [(["h"], "no first states or all"), (["h", "c"], "states of 2 units")])
def test_invalid_states_in_files(states: list[str], message: str) -> None:
    layer = Recurrent("y", ("x", *states), torch.randn(8, 3), torch.randn(8, 2))
    with pytest.raises(WiringError, match=message):
        check_program(Program({"x": (3, 5), "h": (2,), "c": (3,)}, [layer], ("y",)), 2**30)
