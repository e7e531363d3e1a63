"""Paths that the system cannot use raise WiringError wherever the library takes a path."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wirings
from wirings import WiringError, compact, draw, engine, hub, load_compact, models
from wirings.draw.html import write_page
from wirings.history import History, snapshot_of
from wirings.train import data, recipes, results
from wirings.train.saved_runs import open_run
from wirings.utils.files import check_path

PATHS = {"long name": "a" * 300, "deep": "b/" * 3000 + "c", "null": "x\0y", "surrogate": "\ud800"}
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


@pytest.fixture(scope="module")
def users() -> dict[str, Callable[[Any], Any]]:
    """Every function that takes a path as it is, without a suffix of its own."""
    layer, x = nn.Linear(3, 2).eval(), torch.randn(1, 3)
    shipped = wirings.ship(layer, x, seconds=0.001, threads=1)
    wired = nn.Sequential(nn.Linear(3, 2))
    wiring = wirings.wire_(wired, "dnw", density=0.5)
    recorder, history = wirings.Recorder(wiring), snapshot_of(wired)
    digits = models.get("digits_static")
    found: dict[str, Callable[[Any], Any]] = {
        "save_sparse": lambda path: wirings.save_sparse(layer, path),
        "load_sparse": lambda path: wirings.load_sparse(layer, path),
        "CompactModel.save": shipped.compact.save,
        "Program.save": shipped.compact.program.save,
        "load_compact": load_compact,
        "EngineModel.save": shipped.fast.save,
        "engine.load": engine.load,
        "ship": lambda path: wirings.ship(layer, x, seconds=0.001, threads=1, out=path),
        "ShippedModel.save": shipped.save,
        "save_pretrained": lambda path: hub.save_pretrained(digits, path, card=False),
        "save_pretrained of a run": lambda path: hub.save_pretrained(path, "x", card=False),
        "results of a card": lambda path: hub.save_pretrained(digits, "x", results=[path]),
        "push_to_hub": lambda path: hub.push_to_hub(path, "me/x", card=False),
        "from_pretrained": hub.from_pretrained,
        "rewire_": lambda path: wirings.rewire_(nn.Linear(3, 2), path),
        "Recorder": lambda path: wirings.Recorder(wiring, path=path),
        "Recorder.save": recorder.save,
        "History.load": History.load,
        "open_run": open_run,
        "results.read": results.read,
        "draw.save": lambda path: draw.save(path, draw.gains, shipped.report),
        "draw.save_pictures": lambda path: draw.save_pictures(history, path),
        "write_page": lambda path: write_page(history, path, "title"),
    }
    if engine.available():
        fast = engine.compile(shipped.compact, engine="sparse", threads=1)
        found["EngineModel.export"] = fast.export
        found["EngineModel.export, name"] = lambda path: fast.export("x", name=path)
        found["EngineModel.export, target"] = lambda path: fast.export("x", target=path)
    return found


@pytest.mark.parametrize("path", [*PATHS.values(), 3, 0.5, True, b"bytes", ["x"], object()], ids=lambda x: str(x)[:9])
def test_every_function_that_takes_a_path(
    users: dict[str, Callable[[Any], Any]], path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, use in users.items():
        with pytest.raises(WiringError) as caught:
            use(path)
        said = str(caught.value)
        assert len(said) < 1000, name
        assert all(c.isprintable() for c in said), name
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["", ".", "folder"])
def test_a_folder_is_not_a_file(
    users: dict[str, Callable[[Any], Any]], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("save_sparse", "load_sparse", "CompactModel.save", "Program.save", "Recorder.save", "write_page"):
        with pytest.raises(WiringError, match="file"):
            users[name](path)


def test_errors_show_control_characters() -> None:
    assert str(WiringError("a\x1b[2J\r\u202eb\nc")) == "a\\x1b[2J\\r\\u202eb\nc"
    assert str(pickle.loads(pickle.dumps(WiringError("\x07")))) == "\\x07"
