"""Helpers for tests of exported networks: make and build them, and call them through their C interface."""

import ctypes
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.random_programs import RandomProgram
from tests.engine.test_kernels import nodes
from wirings import engine, finalize_, models, wire_
from wirings.compaction.operations import Activation, Add, Attention, Experts, PickTokens, SumTokens, TopShares
from wirings.compaction.program import Program
from wirings.engine import EngineModel

needs_gpp = pytest.mark.skipif(
    not engine.available() or not shutil.which("g++") or os.environ.get("CXX", "g++") != "g++",
    reason="the engine is not built by g++",
)
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
OK, INVALID_ARGUMENT, INVALID_TOKEN, OUT_OF_MEMORY = range(4)


def command(folder: Path) -> list[str]:
    """The command of the README that builds the example."""
    lines = (folder / "README.md").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("g++ ")]
    return shlex.split(line)


def build(folder: Path, compiler: str = "g++", *more: str) -> Path:
    """Build the example as the README says, with all warnings as errors."""
    done = subprocess.run([compiler, *command(folder)[1:], *STRICT, *more], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    assert not done.stderr
    return folder / "example"


def run_example(
    fast: EngineModel, folder: Path, inputs: Sequence[Tensor], threads: int = 2, runner: Sequence[str] = ()
) -> list[Tensor]:
    """The outputs of an example program for inputs."""
    (folder / "input.bin").write_bytes(b"".join(x.contiguous().numpy().tobytes() for x in inputs))
    arguments = [*runner, str(folder / "example"), str(len(inputs[0])), str(threads), "input.bin", "output.bin"]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    assert "the fastest of 10 runs" in done.stdout
    numbers = torch.frombuffer(bytearray((folder / "output.bin").read_bytes()), dtype=torch.float32)
    expected = fast._run(inputs)
    parts = numbers.split([x.numel() for x in expected])
    return [part.reshape(x.shape) for part, x in zip(parts, expected, strict=True)]


class CNetwork:
    """An exported network in a shared library."""

    def __init__(self, library: ctypes.CDLL, name: str, threads: int) -> None:
        self._run, self._free = library[f"{name}_run"], library[f"{name}_free"]
        create = library[f"{name}_create"]
        create.restype, self._free.restype = ctypes.c_void_p, None
        self.handle = create(threads)

    def run(self, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None], batch: int) -> int:
        """The error code."""
        pointers = [ctypes.c_void_p(x if x is None else x.data_ptr()) for x in (*inputs, *outputs)]
        return int(self._run(ctypes.c_void_p(self.handle), ctypes.c_int64(batch), *pointers))

    def __call__(self, inputs: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        outputs = [torch.full_like(x, torch.nan) for x in like]
        assert self.run(inputs, outputs, len(inputs[0])) == OK
        return outputs

    def free(self) -> None:
        self._free(ctypes.c_void_p(self.handle))


def two_segments() -> Program:
    """The bias of the attention is computed before it, in a segment of its own."""
    operations = [
        Activation("bias", ("scores",), "tanh"),
        Activation("tokens", ("x",), "gelu"),
        Attention("attended", ("tokens", "x", "x", "bias"), sizes=(3, 2), value_sizes=(3, 2)),
    ]
    return Program({"x": (5, 20), "scores": (2, 20, 20)}, operations, ("attended", "bias"))


class Recurrent(nn.Module):
    """Recurrent layers in both directions, and their last states."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 19, num_layers=2, bidirectional=True, batch_first=True)
        self.gru, self.out = nn.GRU(38, 17, batch_first=True), nn.Linear(36, 5)

    def forward(self, x: Tensor) -> Tensor:
        x, (_, cells) = self.lstm(x)
        return self.out(torch.cat([self.gru(x)[1][0], cells[-1]], 1))  # type: ignore[no-any-return]


def graph() -> Program:
    """Messages along the edges of a graph, with indices within a larger input."""
    operations = [
        PickTokens("sent", ("x", "edges"), 0, 50, 20),
        SumTokens("received", ("sent", "edges"), 50, 50, 23),
        Activation("active", ("sent",), "gelu"),
        SumTokens("other", ("active", "edges"), 50, 50, 23),
        Add("y", ("received", "other")),
    ]
    return Program({"x": (19, 20), "edges": (3, 50)}, operations, ("y",), {"types": {"edges": "torch.int64"}})


def experts() -> Program:
    """Experts for more tokens than a vector has."""
    into, weight = torch.randn(5, 26, 9) * (torch.rand(5, 26, 9) < 0.4), torch.randn(5, 11, 13)
    operations = [
        TopShares("shares", ("scores",), 2, True, True),
        Experts("y", ("x", "shares"), into, weight, "silu", True, 2),
    ]
    return Program({"x": (9, 37), "scores": (5, 37)}, operations, ("y",))


def network(name: str) -> EngineModel:
    """Networks of all kinds, compiled for two threads."""
    torch.manual_seed(0)
    if name == "nodes":
        return engine.compile(nodes(3, (33, 30), [12, 18, 10], 1, 0.3), engine="sparse", threads=2)
    if name == "segments":
        return engine.compile(two_segments(), engine="sparse", threads=2)
    if name == "random":
        return engine.compile(RandomProgram(4, (5, 13, 9)).program(12), engine="dense", threads=2)
    if name == "recurrent":
        layers = Recurrent()
        wire_(layers, "random", density=0.4)
        return engine.compile(finalize_(layers), torch.randn(1, 9, 12), engine="sparse", threads=2)
    if name == "graph":
        return engine.compile(graph(), engine="dense", threads=2)
    if name == "experts":
        return engine.compile(experts(), engine="sparse", threads=2)
    if name == "bfloat16":
        layers = nn.Sequential(nn.Linear(33, 40), nn.ReLU(), nn.Linear(40, 21))
        wire_(layers, "random", budget={"0": 0.3, "2": 1.0})
        return engine.compile(finalize_(layers), torch.randn(1, 33), engine="sparse", threads=2, dtype="bfloat16")
    if name == "gpt":
        sizes = {"layers": 2, "heads": 2, "width": 32, "context": 12, "classes": 20}
        return engine.compile(
            models.get("gpt", rule="dnw", density=0.3, **sizes), torch.randint(20, (1, 12)), threads=2
        )
    sizes = {"vit": {"layers": 2, "width": 16, "heads": 2, "image_size": 8, "density": 0.3}}.get(name, {})
    sizes |= {"mobilenetv1_dnw": {"width": 0.1, "image_size": 64}, "resnet18": {"width": 0.25, "density": 0.05}}.get(
        name, {}
    )
    size = sizes.get("image_size", 32)
    model: Any = models.get(name, rule="dnw", **sizes)
    images = torch.randn(2, *getattr(model, "input_shape", (3, size, size)))
    model.train()(images)
    return engine.compile(model.eval(), images, engine="dense" if name == "resnet18" else "sparse", threads=2)


NETWORKS = (
    "nodes",
    "random",
    "segments",
    "recurrent",
    "graph",
    "experts",
    "bfloat16",
    "gpt",
    "vit",
    "digits_static",
    "mobilenetv1_dnw",
    "resnet18",
)


def check_equal(
    fast: EngineModel, folder: Path, tolerance: float = 0.0, batches: Sequence[int] = (1, 2, 5), **how: Any
) -> None:
    """The example program returns what the engine does: bit for bit unless a tolerance says otherwise."""
    for batch in batches:
        inputs = fast.program.example(batch)
        for found, expected in zip(run_example(fast, folder, inputs, **how), fast._run(inputs), strict=True):
            if tolerance:
                torch.testing.assert_close(
                    found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
                )
            else:
                assert torch.equal(found, expected)
