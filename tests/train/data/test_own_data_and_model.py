"""A data set and a model from outside the package: one module, found by the registries and the contract tests."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import processes
import pytest

MODULE = '''
import torch
from torch import nn

from wirings import models
from wirings.train.data import Data, ImageDataset, LoadOptions, device_loaders, register_dataset


@register_dataset("stripes")
class Stripes(ImageDataset):
    """Horizontal and vertical stripes."""

    classes, class_names, image_size = 2, ("horizontal", "vertical"), 8
    mean, std = (0.5,), (0.5,)
    reads_files = False

    def load(self, options: LoadOptions) -> Data:
        images = torch.zeros(20, 1, 8, 8, dtype=torch.uint8)
        images[::2, :, ::2] = images[1::2, :, :, ::2] = 255
        labels = torch.arange(20) % 2
        train, test = (images[:16], labels[:16]), (images[16:], labels[16:])
        loaders = device_loaders(options, train, test, mean=self.mean, std=self.std, padding=1)
        return Data(self.name, 2, (1, 8, 8), *loaders)


class Flat(nn.Sequential):
    input_shape = (1, 8, 8)


@models.register
def flat(hidden: int = 32, classes: int = 2) -> nn.Module:
    """Two linear layers."""
    return Flat(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, classes))
'''
TESTS = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "stripes.py").write_text(MODULE)
    paths = [str(tmp_path), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def test_contract_tests_find_them(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "stripes", "-p", "no:cacheprovider", "-q", "-k", "stripes or flat"]
    files = [TESTS / "train" / "data" / "test_dataset_contract.py", TESTS / "models" / "test_model_contract.py"]
    done = subprocess.run(
        [*command, *map(str, files)], cwd=TESTS.parent, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "10 passed" in done.stdout, done.stdout  # 7 of the data set, 3 of the model


def command(folder: str, *words: str) -> None:
    """The command line, where the module has been imported."""
    sys.path.insert(0, folder)
    importlib.import_module("stripes")
    processes.command(*words)


def test_trains_and_predicts(tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    image.linear_gradient("L").save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> str:
        output = tmp_path / "output.txt"
        process = processes.start(command, str(tmp_path), *words, output=output)
        assert processes.wait(process) == 0, output.read_text()
        return output.read_text()

    changes = ["data.name=stripes", "model.name=flat", "model.options={density: 0.5}", "epochs=2", "batch=8"]
    call("train", "digits/static-dnw", *(word for change in changes for word in ("--set", change)), "--out", "run")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["edges"] == (64 * 32 + 32 * 2) // 2
    said = call("predict", "run", "image.png")
    assert sorted(guess.split()[0] for guess in said.partition(": ")[2].split(", ")) == ["horizontal", "vertical"]
