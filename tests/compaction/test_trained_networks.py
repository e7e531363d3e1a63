"""Trained networks: compact, exported, compiled or loaded, they predict the same for test images."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from soak import SOAK
from torch import Tensor
from typer.testing import CliRunner

from wirings import compact, engine, load_compact
from wirings.cli.app import app
from wirings.train import bundled
from wirings.train import saved_runs as runs
from wirings.train.build import load_data
from wirings.train.ship_run import example_of
from wirings.utils.cache import cache_folder


@pytest.mark.parametrize("name", bundled.names())
def test_trained_networks_keep_their_outputs(name: str) -> None:
    opened = runs.open_run(name, device="cpu")
    model, x = opened.model, example_of(name, opened, batch=16)
    small = compact(model, x[:4])
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(small(x), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert small.report is not None
    assert small.report.difference < 1e-5
    assert small.report.after.nodes <= small.report.before.nodes
    assert small.report.after.mult_adds <= small.report.before.mult_adds


@pytest.mark.slow
@pytest.mark.parametrize("name", bundled.names())
def test_predictions_of_trained_networks(name: str, tmp_path: Path) -> None:
    """Uses every tenth of 10,000 images, unless ``WIRINGS_SOAK=1`` asks for all of them."""
    settings = runs.open_run(name, device="cpu")[1]
    if settings.data.name != "cifar10" or not (cache_folder() / "cifar10.npy").exists():
        pytest.skip("its data is not in the cache; `wirings data cifar10` puts CIFAR-10 there")
    accuracy = predicts_the_same(name, tmp_path, every=1 if SOAK else 10)
    # The accuracy on the card was measured in half precision. That of 1,000 images has a standard error of 1.3.
    assert accuracy == pytest.approx(bundled.card_of(name).measured, abs=0.1 if SOAK else 2.5)


def test_predictions_of_a_run_on_digits(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "model.onnx"
    done = CliRunner().invoke(app, ["train", "digits/static-dnw", "--set", "epochs=6", "--out", str(run)])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["compact", str(run), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert out.exists()
    assert predicts_the_same(str(run), tmp_path) > 50


def predicts_the_same(run: str, folder: Path, every: int = 1) -> float:
    """Compare every form of a network with it on one of ``every`` test images; returns its accuracy in percent."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model, settings, _, place = runs.open_run(run, device="cpu")
    test = load_data(settings, place).test
    batches = list(test.epoch(0))
    assert sum(len(y) for _, y in batches) == test.examples
    images, labels = [x[::every] for x, _ in batches], torch.cat([y[::every] for _, y in batches])
    small = compact(model, images[0][:2])
    session = onnxruntime.InferenceSession(str(small.save(folder / "model.onnx")))
    back = load_compact(small.save(folder / "model.safetensors"))
    plain = torch.export.load(small.save(folder / "model.pt2")).module()
    compiled = engine.compile(small, engine="sparse")

    def by_runtime(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"input": x.numpy()})[0])

    def predictions(network: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.no_grad():
            return torch.cat([network(x).argmax(1) for x in images])

    expected = predictions(model)
    assert len(expected) >= test.examples / every
    for network in (small, back, by_runtime, plain, compiled):
        assert torch.equal(predictions(network), expected)
    return 100 * float((expected == labels).double().mean())


def test_command_line(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    out = tmp_path / "model.onnx"
    result = CliRunner().invoke(app, ["compact", "table1/static-dnw", "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "multiply-adds" in result.output
    assert out.exists()
    result = CliRunner().invoke(app, ["compact", "table1/static-dnw", "-o", str(tmp_path / "model.tflite")])
    assert "ends in" in str(result.exception)
