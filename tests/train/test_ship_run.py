"""`wirings ship`: runs are measured by their own metric, on their own test set."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import call

from wirings import WiringError
from wirings.train import recipes
from wirings.train.run import loop
from wirings.train.saved_runs import measure, measure_by
from wirings.train.settings import with_overrides
from wirings.train.ship_run import ship_run

QUICK: dict[str, Any] = {"seconds": 0.01}
GPT = [
    "model.options.layers=1",
    "model.options.heads=2",
    "model.options.width=32",
    "model.options.context=8",
    "batch=4",
]
GPT += ["steps=5", "schedule.warmup_steps=2", "data.options={context: 8, epoch_steps: 2}"]


def trained(folder: Path, recipe: str, *changes: str) -> Path:
    settings = with_overrides(recipes.get(recipe).settings, list(changes))[0]
    loop.train(recipe, settings, folder, device="cpu")
    return folder


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("digits") / "run", "digits/static-dnw", "epochs=1", "batch=100")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "corpus").mkdir()
    (folder / "corpus" / "input.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return trained(folder / "run", "text/dnw-10", f"data.directory={folder / 'corpus'}", *GPT)


def test_a_run_of_images_is_measured_by_accuracy(digits: Path, tmp_path: Path) -> None:
    said = call("ship", digits, "--quick", "--threads", 1, "--out", tmp_path / "out")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    _, accuracy, _ = measure(digits, device="cpu")
    assert report["metric"]["before"] == pytest.approx(accuracy)
    assert report["metric"]["after"] == pytest.approx(accuracy, abs=0.3)  # one image may be on the edge
    assert report["metric"]["examples"] == 397
    assert report["model"] == f"{digits} (digits/static-dnw)"
    assert report["threads"] == 1
    assert report["example"] == "(1, 1, 8, 8)"
    row = next(line.split() for line in said.splitlines() if line.startswith("accuracy "))
    assert row[:3] == ["accuracy", f"{accuracy:.2f}", "%"]
    written = "compact.safetensors, engine.safetensors, gains.png, model.onnx, report.json, report.md"
    assert said.endswith(f"wrote {written} to {tmp_path / 'out'}\n")


def test_a_run_in_int8_is_calibrated_on_its_training_data(digits: Path) -> None:
    said = json.loads(call("ship", digits, "--quick", "--threads", 1, "--int8", "--json"))
    assert said["quantize"] == "int8"
    assert said["metric"]["after"] == pytest.approx(said["metric"]["before"], abs=0.6)
    assert not any("calibration" in note for note in said["notes"])
    assert any(note.startswith("Layers in int8: ") for note in said["notes"])


def test_limits_the_number_of_examples(digits: Path) -> None:
    said = json.loads(call("ship", digits, "--quick", "--examples", 150, "--json"))
    assert said["metric"]["examples"] == 150
    assert said["metric"]["before"] in [pytest.approx(100 * right / 150) for right in range(151)]
    assert json.loads(call("ship", digits, "--quick", "--examples", 0, "--json"))["metric"] is None


def test_a_run_of_text_is_measured_by_bits_per_byte(text: Path) -> None:
    shipped = ship_run(text, dtype="bfloat16", **QUICK)
    metric = shipped.report.metric
    assert metric is not None, shipped.report.notes
    expected = measure_by(text, device="cpu")
    assert (metric.label, metric.unit) == ("bits per byte", " bits per byte")
    assert metric.before == pytest.approx(expected.value, abs=0.05)  # training may evaluate in half precision
    assert metric.after == pytest.approx(metric.before, abs=0.05)
    assert metric.after != metric.before  # the weights are rounded
    assert shipped.report.example == "(1, 8)"


def test_data_that_is_not_there(text: Path, digits: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    corpus = text.parent / "corpus"
    corpus.rename(text.parent / "moved")
    try:
        report = ship_run(text, **QUICK).report
        assert report.metric is None
        assert any(note.startswith("The network was not measured on data: ") for note in report.notes)
        with pytest.raises(WiringError, match="nowhere"):
            call("ship", text, "--data", tmp_path / "nowhere")
        call("ship", text, "--quick", "--data", text.parent / "moved", "--examples", 4)
    finally:
        (text.parent / "moved").rename(corpus)
    with pytest.raises(WiringError, match=r"data set 'digits' reads no files, got directory = "):
        call("ship", digits, "--data", tmp_path)


def test_other_image_sizes_are_timed_but_not_measured(digits: Path) -> None:
    report = ship_run(digits, image_size=12, **QUICK).report
    assert report.example == "(1, 1, 12, 12)"
    assert report.metric is None
    assert "have 8 × 8 pixels, got image_size = 12" in report.notes[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], r"nothing is not the folder of a run: expected last\.safetensors and settings\.yaml in it"),
        (["table1/static-dnw", "--threads", "0"], r"--threads must be at least 1, got 0"),
        (["table1/static-dnw", "--examples", "-1"], r"--examples must be at least 0, got -1"),
        (["table1/static-dnw", "--dtype", "int3"], r"dtype 'int3'"),
    ],
)
def test_rejects_invalid_arguments(arguments: list[str], message: str) -> None:
    with pytest.raises(WiringError, match=message):
        call("ship", *arguments)


def test_rejects_image_sizes_of_text_and_a_run_without_a_checkpoint(text: Path, tmp_path: Path) -> None:
    with pytest.raises(WiringError, match=r"was trained on tokens, which have no image size"):
        call("ship", text, "--image-size", 8)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "settings.yaml").write_text("")
    with pytest.raises(WiringError, match=r"is not the folder of a run: expected last\.safetensors"):
        call("ship", tmp_path / "run")
    assert torch.get_num_threads() == 1
