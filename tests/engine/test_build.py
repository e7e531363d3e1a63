"""The compiled kernels are found, built and cached; without them, networks run on PyTorch."""

import ctypes
import os
import platform
import shutil
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import processes
import pytest
import torch
from torch import nn

from wirings import engine
from wirings.engine import build
from wirings.utils import compiler
from wirings.utils.cache import cache_folder

needs_compiler = pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("WIRINGS_CACHE", str(tmp_path))
    monkeypatch.delenv("WIRINGS_ENGINE", raising=False)
    return tmp_path


def network() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    images = torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        return model, images, model(images)


def falls_back(words: str) -> None:
    """A warning says once why there are no kernels, and the outputs are the same."""
    model, images, expected = network()
    with pytest.warns(UserWarning, match=words):
        made = engine.compile(model, images)
    assert not made.compiled
    torch.testing.assert_close(made(images), expected)
    assert {step.way for step in made.report.steps} == {"torch"}
    with warnings.catch_warnings():  # a second time it says nothing
        warnings.simplefilter("error")
        engine.compile(model, images)


def test_without_a_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(folder))
    falls_back("There is no C\\+\\+ compiler: install g\\+\\+ or clang\\+\\+, or name one in CXX")


def test_missing_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(folder / "nothing"))
    falls_back("nothing could not be run")


def test_failing_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = folder / "broken"
    broken.write_text('#!/bin/sh\necho "out of luck" >&2\nexit 1\n')
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(broken))
    falls_back("broken failed: out of luck")
    assert not list(folder.glob("engine/*"))


def test_compiler_that_writes_an_invalid_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = folder / "nonsense"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\nfor last; do :; done\necho nonsense > "$last"\n')
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(broken))
    falls_back(r"Remove .*kernels-.*\.so to have it built again, or set WIRINGS_CACHE")


def test_compiler_that_hangs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = folder / "slow"
    slow.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\nexec sleep 60\n')
    slow.chmod(slow.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setattr(compiler, "SECONDS", 0.5)
    falls_back("slow could not be run: .*timed out after 0.5 seconds")
    assert not list(folder.glob("engine/*"))


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="it asks Linux how much memory it has")
def test_without_threads() -> None:
    script = (
        "import resource, torch\n"
        "from pathlib import Path\n"
        "from tests.engine.test_build import network\n"
        "from wirings import engine\n"
        "torch.set_num_threads(1)\n"
        "model, images, expected = network()\n"
        "made = engine.compile(model, images, engine='sparse', threads=1)\n"
        "size = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + 2**29, size + 2**29))\n"
        "before = len(list(Path('/proc/self/task').iterdir()))\n"
        "made = engine.compile(model, images, engine='sparse', threads=3)\n"
        "assert made.compiled\n"
        "assert len(list(Path('/proc/self/task').iterdir())) == before, 'there were threads'\n"
        "torch.testing.assert_close(made(images), expected)\n"
        "torch.testing.assert_close(made(images[:1]), expected[:1])\n"
    )
    command = ["sh", "-c", 'ulimit -s 4194304 && exec "$@"', "sh", sys.executable, "-c", script]  # 4 GiB for a thread
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    if "ulimit" in done.stderr:
        pytest.skip("the stack's size cannot be set here")
    assert done.returncode == 0, done.stderr


def test_unwritable_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "engine").write_text("a file is in the way")
    falls_back("Set WIRINGS_CACHE to another folder")


def test_environment_variable_disables_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIRINGS_ENGINE", "torch")
    model, images, expected = network()
    made = engine.compile(model, images)  # and nothing is said, since it is what the user wants
    assert not made.compiled
    torch.testing.assert_close(made(images), expected)


@needs_compiler
@pytest.mark.slow
def test_kernels_are_built_once(folder: Path) -> None:
    library = build.SOURCE.built(compiler.compilers(""), folder / "engine")
    assert library.parent == folder / "engine"
    written = library.stat().st_mtime_ns
    assert build.SOURCE.built(compiler.compilers(""), folder / "engine") == library
    assert library.stat().st_mtime_ns == written
    build._declared(ctypes.CDLL(str(library)))


@needs_compiler
def test_built_kernels_are_found_without_a_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WIRINGS_CACHE")
    usual = build.SOURCE.built(
        compiler.compilers(os.environ.get("CXX", "")), cache_folder() / "engine"
    )  # is there already
    monkeypatch.setenv("WIRINGS_CACHE", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(folder))
    (folder / "engine").mkdir()
    other = usual.name.replace(build.SOURCE.key(), "0" * 16)  # of another processor, or from another source
    assert other != usual.name
    (folder / "engine" / other).write_bytes(b"")
    with pytest.raises(compiler.MissingError, match="There is no C"):
        build.SOURCE.load_built(folder)
    shutil.copy(usual, folder / "engine")
    build._kernels.cache_clear()
    model, images, expected = network()
    made = engine.compile(model, images)
    assert made.compiled
    torch.testing.assert_close(made(images), expected)
    build._kernels.cache_clear()


def check_kernels() -> None:
    from tests.engine.all_in_int8 import all_layers, loss
    from tests.engine.random_programs import RandomProgram
    from tests.engine.test_kernels import differences, nodes
    from wirings.engine.engine_model import EngineModel

    for way in ("sparse", "dense"):
        programs = [nodes(0, size, [20, 17, 9], 2, 0.3) for size in ((7, 7), (14, 14), (33, 17))]
        programs += [RandomProgram(seed, (3, 5 + seed % 13, 9)).program(8) for seed in range(40)]
        for program in programs:
            images = torch.randn(3, *program.inputs["x"])
            assert max(differences(program, images, engine=way, threads=2)) < 1e-5
            quantization = all_layers(program, images, static=way == "sparse")
            fast = EngineModel(program, way, 2, quantization=quantization)
            for found, expected in zip(fast._run([images]), quantization.reference(program).run(images), strict=True):
                assert loss(found, expected) < 0.02


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("flags", ["-mno-avx512f", "-mno-avx", "-mno-avx512vnni"])
def test_other_vector_widths(flags: str, tmp_path: Path) -> None:
    if "x86" not in platform.machine():
        pytest.skip("these flags are for x86")
    (command, *_) = compiler.compilers("")
    output = tmp_path / "output.txt"
    environment = {"CXX": f"{command[0]} {flags}", "WIRINGS_CACHE": str(tmp_path)}
    process = processes.start(check_kernels, output=output, env=environment)
    assert processes.wait(process, 600) == 0, output.read_text()
