"""Pipes and devices in place of files: a folder of somebody else may hold links to them under any name."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from wirings import WiringError, engine, hub, load_compact, load_sparse, rewire_
from wirings.history import History
from wirings.models import authors
from wirings.train import data, recipes, results
from wirings.train.data import cifar100
from wirings.train.data.cifar10 import read as read_prepared
from wirings.train.data.cifar10_layouts import read_archive
from wirings.train.run import checkpoint
from wirings.train.run.heartbeat import read_beat
from wirings.train.sweep.plan import read_sweep_file
from wirings.train.tables.leaderboard import step_costs
from wirings.utils.files import read_regular, read_regular_text

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs pipes with names")


def read_data(name: str) -> Callable[[Path], Any]:
    def read(path: Path) -> None:
        loaded = data.load(name, directory=path.parents[2] if name == "folder" else path.parent, batch=1, workers=0)
        list(loaded.train.epoch(0))

    return read


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "compact": ("a.safetensors", load_compact),
    "engine": ("a.safetensors", engine.load),
    "sparse": ("a.safetensors", lambda path: load_sparse(nn.Linear(2, 2), path)),
    "checkpoint": ("a.safetensors", checkpoint.read),
    "history": ("a.wirings", History.load),
    "result": ("result.json", results.read),
    "settings": ("settings.yaml", results.load_settings),
    "recipe": ("mine.yaml", lambda path: recipes.get(str(path))),
    "sweep": ("sweep.yaml", read_sweep_file),
    "benchmark": ("benchmarks/rules-x.json", lambda path: step_costs(path.parents[1])),
    "hub": ("config.json", lambda path: hub.from_pretrained(path.parent)),
    "Hugging Face": ("config.json", lambda path: rewire_(nn.Linear(2, 2), path.parent)),
    "authors": ("a.pt", authors.load),
    "CIFAR-10, prepared": ("a.npy", read_prepared),
    "CIFAR-10, packed": ("a.tar.gz", read_archive),
    "CIFAR-100, prepared": ("a.npy", cifar100.read),
    "text": ("train.txt", read_data("text")),
    "text, packed": ("train.txt.gz", read_data("text")),
    "images": ("train/ant/0.png", read_data("folder")),
    "shards": ("train-000.tar", read_data("shards")),
}


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """Fail instead of waiting for a pipe, or filling the memory."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for a pipe, or reads a device"))
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["pipe", "link to a device"])
def test_readers_refuse(name: str, kind: str, tmp_path: Path) -> None:
    file, read = READERS[name]
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):  # classes, for the reader of images
        (tmp_path / split / "ant").mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(WiringError):
        read(path)


def test_a_heartbeat_is_missing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "progress.json")
    assert read_beat(tmp_path) is None


def test_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("é\r\nb\n".encode())
    assert read_regular(path) == "é\r\nb\n".encode()
    assert read_regular_text(path) == path.read_text(encoding="utf-8") == "é\nb\n"
    with pytest.raises(OSError, match="it is a folder, a pipe or a device"):
        read_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "b.txt")
