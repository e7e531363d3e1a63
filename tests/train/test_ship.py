"""`wirings.ship`: what is measured, what is written, and what the report says."""

import dataclasses
import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wirings
from wirings import WiringError, engine, models
from wirings.engine.ship_report import COMPACT, ENGINE, ONNX, ORIGINAL, ShipReport, ShipSide, TorchSteps
from wirings.engine.turns import Timing, time_in_turns
from wirings.train import ship as shipping

FAST = {"seconds": 0.01}
ALL = [ORIGINAL, COMPACT, ONNX, ENGINE]


def cnn(density: float = 0.1) -> nn.Module:
    """A wired convolutional network whose weights differ enough from zero to survive rounding."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip
    wirings.wire_(model, "dnw", density=density)
    return model


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Tensor, wirings.ShippedModel, Path]:
    """A network, an example, and what shipping it gives and writes."""
    torch.manual_seed(0)
    model, x, folder = cnn(), torch.randn(2, 3, 12, 12), tmp_path_factory.mktemp("shipped") / "new"
    made = wirings.ship(model, x, out=folder, data=[(torch.randn(9, 3, 12, 12), torch.arange(9) % 4)], **FAST)
    return model, x, made, folder


def test_measures_every_side_in_one_call(shipped: Any) -> None:
    model, x, made, _ = shipped
    report = made.report
    assert [side.name for side in report.sides] == ALL
    assert all(side.timing.turns >= 5 and 0 < side.timing.fastest <= side.timing.median for side in report.sides)
    assert report.sides[0].difference == 0
    assert all(0 <= side.difference < 1e-5 for side in report.sides)
    assert (report.model, report.example, report.threads) == ("Sequential", "(2, 3, 12, 12)", torch.get_num_threads())
    assert report.sizes == made.compact.report
    assert 0 < report.bytes_after < report.bytes_before
    assert report.speedup == report.sides[0].timing.median / report.shipped.timing.median
    with torch.no_grad():
        expected = wirings.finalize_(model).eval()(x)
    for network in (made.fast, made.compact):
        torch.testing.assert_close(network(x), expected, rtol=1e-4, atol=1e-5)


def test_the_model_is_left_wired() -> None:
    model = cnn().train()
    wirings.ship(model, (3, 8, 8), **FAST)
    assert model.training
    assert wirings.finalize_(model) is model  # still wired, so it can be finalized


def test_accuracy_before_and_after(shipped: Any) -> None:
    _, _, made, _ = shipped
    metric = made.report.metric
    assert (metric.label, metric.examples, metric.unit) == ("accuracy", 9, " %")
    assert metric.before == metric.after
    assert metric.before in [100 * right / 9 for right in range(10)]


def test_writes_files_that_give_the_same_outputs(shipped: Any) -> None:
    _, x, made, folder = shipped
    written = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert {name: written[name] for name in made.report.files} == made.report.files
    assert set(written) == {*made.report.files, "report.json", "report.md", "gains.png"}
    assert torch.equal(wirings.load_compact(folder / "compact.safetensors")(x), made.compact(x))
    again = engine.load(folder / "engine.safetensors")
    assert again.choices == made.fast.choices
    assert torch.equal(again(x), made.fast(x))
    assert (folder / "gains.png").read_bytes()[:4] == b"\x89PNG"
    assert written["gains.png"] > 10_000
    page = (folder / "report.md").read_text()
    assert "| ms, engine |" in page
    assert "![before and after](gains.png)" in page


def test_the_report_survives_json(shipped: Any) -> None:
    _, _, made, folder = shipped
    read = json.loads((folder / "report.json").read_text())
    assert read == made.report.as_mapping()
    assert ShipReport.from_mapping(read) == made.report


def test_prints_a_table(shipped: Any) -> None:
    _, _, made, _ = shipped
    text = str(made)
    first, _, header, *lines = text.splitlines()
    assert first.startswith("Sequential, input (2, 3, 12, 12), ")
    assert header.split() == ["before", "after", "gain"]
    rows = [line.split("  ")[0] for line in lines[1:10]]
    assert rows == [
        "ms, PyTorch", "ms, ONNX Runtime", "ms, engine", "bytes of the file", "parameters", "multiply-adds",
        "multiply-adds, with zeros", "accuracy", "largest difference of outputs",
    ]  # fmt: skip
    assert f"compact.safetensors {made.report.bytes_after:,} bytes" in text


def test_saves_later_what_out_writes(shipped: Any, tmp_path: Path) -> None:
    _, x, made, folder = shipped
    later = made.save(tmp_path / "later")
    assert {p.name: p.stat().st_size for p in later.iterdir()} == {p.name: p.stat().st_size for p in folder.iterdir()}
    for name in ("report.json", "report.md", "gains.png"):
        assert (later / name).read_bytes() == (folder / name).read_bytes()
    assert torch.equal(engine.load(later / "engine.safetensors")(x), made.fast(x))


def test_rounded_files_are_measured_as_they_load(tmp_path: Path) -> None:
    model, x = cnn(), torch.randn(3, 3, 8, 8)
    plain = wirings.ship(model, x, **FAST).report
    made = wirings.ship(model, x, out=tmp_path, dtype="int8", **FAST)
    report = made.report
    assert report.dtype == "int8"
    assert report.bytes_after < plain.bytes_after
    assert all(1e-4 < side.difference < 0.1 for side in report.sides[1:])
    assert "bytes of the file, int8" in str(report)
    assert torch.equal(wirings.load_compact(tmp_path / "compact.safetensors")(x), made.compact(x))
    assert torch.equal(engine.load(tmp_path / "engine.safetensors")(x), made.fast(x))


# ---- inputs and outputs ---------------------------------------------------------------------------------------------


def test_ships_a_gpt_and_counts_its_next_tokens() -> None:
    model = models.get("gpt", rule="dnw", density=0.2, layers=1, heads=2, width=16, context=8, classes=20)
    tokens = torch.randint(20, (6, 8))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100  # nothing follows
    made = wirings.ship(model, data=[(tokens, labels)], **FAST)
    assert made.report.metric is not None
    assert made.report.metric.examples == 6 * 7
    assert made.report.metric.before == made.report.metric.after
    assert made.report.shipped.difference < 1e-5
    assert made.fast(tokens).shape == (6, 8, 20)


class Named(nn.Module):
    """Takes keyword arguments and returns a dictionary, as networks of other libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor, mask: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        hidden = self.embedding(ids) * mask[..., None]
        return {"hidden": hidden, "logits": scale * self.head(hidden).relu()}


def test_keyword_inputs_and_named_outputs() -> None:
    inputs = {"ids": torch.randint(11, (2, 5)), "mask": torch.ones(2, 5)}
    labels = torch.randint(3, (2, 5))
    made = wirings.ship(Named(), {**inputs, "scale": 2.0}, data=[(inputs, labels)], **FAST)
    assert made.report.example == "ids=(2, 5), mask=(2, 5), scale=2.0"
    assert made.fast(**inputs).logits.shape == (2, 5, 3)
    assert made.report.metric is not None
    assert made.report.metric.examples == 10
    assert made.report.metric.before == made.report.metric.after


class ChangesItsInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sub_(1).relu()


def test_models_may_change_their_input_in_place() -> None:
    x = torch.randn(2, 6)
    before = x.clone()
    made = wirings.ship(nn.Sequential(ChangesItsInput(), nn.Linear(6, 2)), x, **FAST)
    assert torch.equal(x, before)
    assert made.report.shipped.difference < 1e-5


def test_any_function_can_be_the_measure() -> None:
    seen = []

    def mean_output(model: nn.Module) -> float:
        seen.append(model)
        return float(model(torch.ones(1, 3)).mean())

    made = wirings.ship(nn.Linear(3, 2), torch.randn(1, 3), data=mean_output, **FAST)
    assert made.report.metric is not None
    assert (made.report.metric.label, made.report.metric.examples) == ("mean output", None)
    assert math.isclose(made.report.metric.before, made.report.metric.after, rel_tol=1e-5)
    assert seen[1] is made.fast


# ---- honesty --------------------------------------------------------------------------------------------------------


def times(**medians: float) -> Callable[..., dict[str, Timing]]:
    """Stands in for `time_in_turns`, with these medians for original, compact, onnx and engine."""

    def timed(sides: dict[str, Any], seconds: float) -> dict[str, Timing]:
        given = dict(zip(ALL, medians.values(), strict=True))
        return {name: Timing(given[name], given[name], given[name], given[name], 5, 0) for name in sides}

    return timed


def test_pytorch_is_used_where_the_engine_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "time_in_turns", times(original=2.0, compact=0.5, onnx=0.25, engine=1.0))
    made = wirings.ship(nn.Linear(3, 2), torch.randn(1, 3), **FAST)
    assert (made.report.used, made.fast.engine, made.fast.compiled) == ("torch", "torch", False)
    assert made.report.speedup == 4
    assert made.report.summary == (
        "The engine gains nothing here (1,000 ms; the compact network in PyTorch takes 500 ms), so PyTorch is used. "
        "ONNX Runtime is fastest (250 ms)."
    )
    assert "ms, engine" in str(made)


def test_says_when_the_original_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "time_in_turns", times(original=0.1, compact=0.5, onnx=1.0, engine=0.2))
    made = wirings.ship(nn.Linear(3, 2), torch.randn(1, 3), **FAST)
    assert made.report.used == "engine"
    assert made.report.summary.endswith("The original network is faster in PyTorch (100 ms): for speed, keep that one.")


def test_without_kernels_pytorch_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wirings.engine.engine_model.kernels", lambda: None)
    report = wirings.ship(nn.Linear(3, 2), torch.randn(1, 3), **FAST).report
    assert [side.name for side in report.sides] == [ORIGINAL, COMPACT, ONNX]
    assert report.summary.startswith("The kernels of the engine are not available on this machine, so PyTorch is used.")


def test_lists_what_is_left_to_pytorch() -> None:
    class Squares(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(x, x.cumsum(-1))

    report = wirings.ship(nn.Sequential(nn.Conv2d(3, 4, 1), Squares()), torch.randn(1, 3, 4, 4), **FAST).report
    left = {steps.kind.partition(".")[0]: steps.count for steps in report.left_to_torch}
    assert left == {"aten::cumsum": 1, "aten::matmul": 1}
    assert "Left to PyTorch by the engine: 1 × aten::" in str(report)
    assert report.notes == ["Not counted in the multiply-adds, before and after: 1 × aten::matmul."]


def test_names_at_most_eight_kinds(shipped: Any) -> None:
    left = [TorchSteps(f"kind{i}", 2, 1e-5) for i in range(10)]
    text = str(dataclasses.replace(shipped[2].report, left_to_torch=left))
    assert "2 × kind7 (10 µs), and 2 more kinds." in text
    assert "kind8" not in text


def test_does_without_onnx_runtime_and_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing, find_spec = ("onnxruntime", "matplotlib"), importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *more: None if name in missing else find_spec(name, *more)
    )
    made = wirings.ship(nn.Linear(3, 2), torch.randn(1, 3), out=tmp_path, **FAST)
    assert made.report.side(ONNX) is None
    first, second = made.report.notes
    assert first == 'ONNX Runtime was left out: it is not installed (pip install "wirings[export]").'
    assert second.startswith("There is no picture: it needs matplotlib")
    assert {path.name for path in tmp_path.iterdir()} == {*made.report.files, "report.json", "report.md"}
    assert "model.onnx" not in made.report.files


def test_a_failing_exporter_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no such operator\nwith a long\nexplanation")

    monkeypatch.setattr("wirings.compaction.export._compare", lambda program, what, call: what == "the file" or fails())
    report = wirings.ship(nn.Linear(3, 2), torch.randn(1, 3), **FAST).report
    assert report.notes == ["There is no ONNX file, and ONNX Runtime was left out: no such operator"]


def test_says_that_the_machine_was_busy(shipped: Any) -> None:
    report: ShipReport = shipped[2].report

    def disturbed(count: int) -> ShipReport:
        sides = [ShipSide(s.name, dataclasses.replace(s.timing, disturbed=count), s.difference) for s in report.sides]
        return dataclasses.replace(report, sides=sides)

    assert "machine was busy" not in str(disturbed(0))
    assert f"But the machine was busy in 20 of {sum(s.timing.turns for s in report.sides)} turns" in str(disturbed(5))


def test_sides_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("wirings.engine.turns.PAUSE", 0.001)
    found = time_in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, seconds=0.01)
    turns = [name for name, before in zip(calls, ["", *calls], strict=False) if name != before]
    assert turns[:10] == ["a", "b"] * 5
    assert all(5 <= timing.turns <= 10 for timing in found.values())
    assert found["a"].fastest <= found["a"].q1 <= found["a"].median <= found["a"].q3


@pytest.mark.parametrize(("disturbed", "counted", "left_out"), [(0, (5, 0), 0), (3, (5, 0), 3), (8, (10, 8), 0)])
def test_disturbed_turns_are_repeated(
    monkeypatch: pytest.MonkeyPatch, disturbed: int, counted: tuple[int, int], left_out: int
) -> None:
    """Threads wait in the first turns; the system is asked before and after each."""
    waits = iter([float(i) if i < 2 * disturbed else 1e3 for i in range(100)])
    monkeypatch.setattr("wirings.engine.turns._seconds_waited", lambda: next(waits))
    monkeypatch.setattr("wirings.engine.turns.PAUSE", 0.0)
    found = time_in_turns({"a": lambda: None}, seconds=0.001)["a"]
    assert ((found.turns, found.disturbed), found.left_out) == (counted, left_out)


# ---- errors ---------------------------------------------------------------------------------------------------------


def once() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.randn(1, 3), torch.zeros(1, dtype=torch.long)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, r"threads must be a positive integer, got 0\."),
        ({"seconds": 0}, r"seconds must be a positive number, got 0\."),
        ({"dtype": "int3"}, r"dtype 'int3'"),
        ({"data": 3}, r"data must be a loader of batches \(x, y\), or a function .* got int\."),
        ({"data": once()}, r"got generator, which can be read only once"),
        ({"data": [torch.zeros(1, 3)]}, r"got a batch that is no pair"),
        ({"data": []}, r"data has no labelled examples"),
        ({"data": [(torch.zeros(2, 3), torch.zeros(2))]}, r"accuracy needs integer labels of shape \(2,\)"),
        ({"example_input": "x"}, r"ship: example_input must be a tensor"),
        ({"example_input": torch.zeros(1, 4)}, r"failed on example_input of shape \(1, 4\)"),
    ],
)
def test_rejects_invalid_arguments(options: dict[str, Any], message: str) -> None:
    options = {"example_input": torch.zeros(1, 3), **FAST, **options}
    with pytest.raises(WiringError, match=message):
        wirings.ship(nn.Linear(3, 2), **options)


def test_rejects_a_file_as_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WiringError, match=r"out takes a folder, but .*file is a file"):
        wirings.ship(nn.Linear(3, 2), torch.zeros(1, 3), out=tmp_path / "file")


def test_rejects_what_is_no_model_and_what_cannot_be_traced() -> None:
    with pytest.raises(WiringError, match=r"ship expects a torch\.nn\.Module, got str\."):
        wirings.ship("model")  # type: ignore[arg-type]

    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(WiringError):
        wirings.ship(Branches(), torch.randn(2, 3))
    assert torch.get_num_threads() == 1


class Failing:
    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("the disk is gone")


def fail(model: nn.Module) -> float:
    raise KeyError("label")


INPUTS, LABELS = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([("text", LABELS)], "cannot be run on a batch of data"),
        ([(INPUTS[:, :3], LABELS)], "cannot be run on a batch of data"),
        ([(INPUTS.double(), LABELS)], "cannot be run on a batch of data"),
        ([(INPUTS.to("meta"), LABELS)], "cannot be run on a batch of data"),
        ([({"x": INPUTS}, LABELS)], "cannot be run on a batch of data"),
        ([((), LABELS)], "cannot be run on a batch of data"),
        ([(INPUTS, LABELS.to(torch.complex64))], "integer labels"),
        ([(INPUTS.to_sparse(), LABELS)], r"expects float32 on the CPU, got sparse|cannot be run"),
        (Failing(), "data cannot be read: RuntimeError: the disk is gone"),
        (fail, "the function that was given as data raised KeyError: 'label'"),
        (lambda model: "x", "a function that returns 'x'"),
        (lambda model: None, "a function that returns None"),
        (lambda model: torch.zeros(2), r"a function that returns a Tensor of shape \(2,\)"),
        (lambda model: 10**400, "a function that returns"),
        (lambda: 1.0, "raised TypeError"),
        (nn.Linear(2, 2), "data must be a loader.*got Linear"),
        (type("Loader", (), {"epoch": 3})(), "data must be a loader.*got Loader"),
        (type("Loader", (), {"epoch": lambda self, number: 5})(), "data cannot be read: TypeError"),
    ],
)
def test_odd_data_is_one_error(data: Any, message: str) -> None:
    with pytest.raises(WiringError, match=message):
        wirings.ship(nn.Linear(4, 2), INPUTS[:1], data=data, threads=1, **FAST)


def test_rejects_a_name_that_is_no_text() -> None:
    with pytest.raises(WiringError, match="name must be a text, got 3"):
        wirings.ship(nn.Linear(4, 2), INPUTS[:1], name=3, **FAST)  # type: ignore[arg-type]


# ---- int8 ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")
def test_ships_in_int8(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = cnn(0.5), torch.randn(2, 3, 12, 12)
    data = [(torch.randn(9, 3, 12, 12), torch.arange(9) % 4)]
    made = wirings.ship(model, x, data=data, out=tmp_path, quantize="int8", **FAST)
    report = made.report
    assert report.quantize == "int8"
    assert "ms, engine, int8" in str(report)
    assert report.metric is not None
    (note,) = [line for line in report.notes if line.startswith("Layers in int8: ")]
    assert "In float32: " in note
    assert ShipReport.from_mapping(json.loads(json.dumps(report.as_mapping()))) == report
    if report.used == "engine":
        assert made.fast.quantization is not None
        assert torch.equal(engine.load(tmp_path / "engine.safetensors")(x), made.fast(x))
    assert 0 < report.side(ENGINE).difference < 0.05  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int4"}, "int4"),
        ({"calibrate": [torch.zeros(1, 3, 12, 12)]}, 'calibrate is for quantize="int8"'),
        ({"quantize": "int8", "calibrate": []}, "at least one batch of inputs"),
    ],
)
def test_rejects_invalid_quantisation(options: dict[str, Any], message: str) -> None:
    with pytest.raises(WiringError, match=message):
        wirings.ship(cnn(), torch.randn(2, 3, 12, 12), **options, **FAST)
