"""Every trained network in the repository: compact, exported and back, it sees the same in every image."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from wirings import compact, load_compact
from wirings.cli import app
from wirings.data.cache import cache_folder
from wirings.train import runs, trained


@pytest.mark.parametrize("name", trained.names())
def test_trained_networks_keep_their_outputs(name: str) -> None:
    model, *_ = runs.open_run(name, device="cpu")
    small = compact(model, torch.randn(4, *model.input_shape))  # type: ignore[arg-type]
    x = torch.randn(16, *model.input_shape)  # type: ignore[arg-type]
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(small(x), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert small.report is not None
    assert small.report.difference < 1e-5
    assert small.report.after.nodes < small.report.before.nodes
    assert small.report.after.mult_adds < small.report.before.mult_adds


@pytest.mark.slow
@pytest.mark.parametrize("name", trained.names())
def test_they_see_the_same_in_every_test_image(name: str, tmp_path: Path) -> None:
    if not (cache_folder() / "cifar10.npy").exists():
        pytest.skip("CIFAR-10 is not in the cache; `wirings data cifar10` puts it there")
    onnxruntime = pytest.importorskip("onnxruntime")
    model, settings, _, place = runs.open_run(name, device="cpu")
    images = [x for x, _ in runs.load_data(settings, place).test.epoch(0)]
    small = compact(model, images[0][:2])
    session = onnxruntime.InferenceSession(str(small.save(tmp_path / "model.onnx")))
    back = load_compact(small.save(tmp_path / "model.safetensors"))

    def by_runtime(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"input": x.numpy()})[0])

    def seen(network: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.no_grad():
            return torch.cat([network(x).argmax(1) for x in images])

    expected = seen(model)
    assert len(expected) == 10_000
    for network in (small, back, by_runtime):
        assert torch.equal(seen(network), expected)


def test_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    out = tmp_path / "model.onnx"
    result = CliRunner().invoke(app, ["compact", "table1/static-dnw", "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "multiply-adds" in result.output
    assert out.exists()
    result = CliRunner().invoke(app, ["compact", "table1/static-dnw", "-o", str(tmp_path / "model.tflite")])
    assert "must end in" in str(result.exception)
