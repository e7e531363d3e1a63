"""Paths that the system cannot use raise WiringError wherever the library takes a path."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from wirings import WiringError, compact, engine, load_compact
from wirings.history import History
from wirings.train import data, recipes, results
from wirings.train.saved_runs import open_run
from wirings.utils.files import check_path

PATHS = {"long name": "a" * 300, "deep": "b/" * 3000 + "c", "null": "x\0y"}
READERS: dict[str, Callable[[str], Any]] = {
    "load_compact": lambda path: load_compact(f"{path}.safetensors"),
    "engine.load": lambda path: engine.load(f"{path}.safetensors"),
    "History.load": History.load,
    "open_run": open_run,
    "load_settings": lambda path: results.load_settings(Path(path)),
    "results.read": lambda path: results.read(Path(path)),
    "recipes.get": lambda path: recipes.get(f"{path}.yaml"),
    **{
        name: lambda path, name=name: data.load(name, directory=path, batch=2)  # type: ignore[misc]
        for name in ("cifar10", "folder", "imagenet", "multi30k", "shakespeare", "text")
    },
    "shards": lambda path: data.load("shards", directory=path, batch=2, classes=2),
}


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("reader", READERS)
def test_reading(reader: str, kind: str) -> None:
    with pytest.raises(WiringError) as caught:
        READERS[reader](PATHS[kind])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("ending", ["safetensors", "pt2", "onnx"])
def test_writing(ending: str, kind: str) -> None:
    small = compact(nn.Linear(3, 2).eval(), torch.randn(1, 3))
    with pytest.raises(WiringError, match=r"the path .* cannot be used: .*\. Give another one\."):
        small.save(f"{PATHS[kind]}.{ending}")
    with pytest.raises(WiringError, match="cannot be used"):
        engine.compile(small, engine="torch").save(f"{PATHS[kind]}.{ending}")


def test_paths_that_do_not_exist_are_fine(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file", tmp_path / "none", tmp_path / "file" / "inside"):
        assert check_path(path) == path
