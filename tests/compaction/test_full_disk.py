"""Exporting to a full disk or a read-only folder is one error, and leaves no file behind."""

import errno
import os
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from torch import nn

from wirings import WiringError, compact, engine
from wirings.utils import files

needs_limits = pytest.mark.skipif(sys.platform == "win32", reason="Windows does not limit the size of files")


def small_model() -> Any:
    torch.manual_seed(0)
    return compact(nn.Sequential(nn.Conv2d(1, 40, 3), nn.ReLU(), nn.Conv2d(40, 40, 3)).eval(), torch.randn(2, 1, 8, 8))


def export_with_limit(folder: str, kind: str) -> None:
    """Export with a limit on the size of files, at which writing fails as on a full disk, and say how it ended."""
    import resource

    model: Any = small_model()
    if kind == "engine":
        model = engine.compile(model, threads=1)
    path = Path(folder) / f"model.{'safetensors' if kind == 'engine' else kind}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    try:
        model.save(path)
    except WiringError as error:
        print(f"WiringError: {error}")


@needs_limits
@pytest.mark.parametrize("kind", ["safetensors", "engine", "pt2", "onnx"])
def test_full_disk(kind: str, tmp_path: Path) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnx")
    folder, output = tmp_path / "folder", tmp_path / "output.txt"
    folder.mkdir()
    process = processes.start(export_with_limit, str(folder), kind, output=output)
    assert processes.wait(process) == 0, output.read_text()
    assert "could not be written: the file would be larger than the system allows" in output.read_text()
    assert str(folder / "model") in output.read_text()
    assert not list(folder.iterdir()), "a part of a file"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
@pytest.mark.parametrize("kind", ["safetensors", "pt2"])
def test_read_only_folder(kind: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()

    def refused(path: Path, *args: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "touch", refused)
    reason = "the disk is full" if number == errno.ENOSPC else os.strerror(number)
    with pytest.raises(WiringError, match=rf"model\.{kind} could not be written: {reason}\. Free some space"):
        model.save(tmp_path / f"model.{kind}")
    assert not list(tmp_path.iterdir())


def test_errors_of_other_libraries() -> None:
    assert files.disk_problem(RuntimeError("I/O error: No space left on device (os error 28)")) == "the disk is full"
    assert files.disk_problem(RuntimeError("I/O error: Read-only file system (os error 30)")) == "Read-only file system"
    assert files.disk_problem(RuntimeError("a bug")) is None
