"""Compiled networks as C++ source code: they compute what the engine does, bit for bit."""

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.engine import exported
from tests.engine.exported import CNetwork
from wirings import WiringError, engine
from wirings.compaction.operations import Activation, Conv, InputRef, Linear, TorchOperator
from wirings.compaction.program import Program
from wirings.engine import EngineModel
from wirings.engine.build import kernels
from wirings.engine.export.export_network import TARGETS
from wirings.engine.export.image import NetworkImage, as_text
from wirings.engine.step import KernelSizes

pytestmark = exported.needs_gpp
Built = tuple[ctypes.CDLL, dict[str, EngineModel], Path]
"""A library, the networks in it by name, and the folder of their files."""


# ---- two networks in one library -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A convolutional network and a language model in one library, built with all warnings as errors."""
    folder = tmp_path_factory.mktemp("exported")
    networks = {name: exported.network(name) for name in ("nodes", "gpt")}
    for name, fast in networks.items():
        fast.export(folder, name=name)
        command = [part for part in exported.command(folder) if not part.endswith(".cpp")][:-2]
        subprocess.run(
            [*command, *exported.STRICT, "-fPIC", "-c", f"{name}.cpp", "-o", f"{name}.o"], cwd=folder, check=True
        )
    subprocess.run(["g++", "-shared", "-pthread", "nodes.o", "gpt.o", "-o", "both.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "both.so")), networks, folder


@pytest.fixture(params=["nodes", "gpt"])
def pair(built: Built, request: pytest.FixtureRequest) -> Iterator[tuple[CNetwork, EngineModel]]:
    library, networks, _ = built
    made = CNetwork(library, request.param, threads=2)
    yield made, networks[request.param]
    made.free()


def test_outputs_equal_the_engines_bit_for_bit(pair: tuple[CNetwork, EngineModel]) -> None:
    made, fast = pair
    for batch in (1, 2, 3, 5, 1):
        inputs = fast.program.example(batch)
        expected = fast._run(inputs)
        for found, one in zip(made(inputs, expected), expected, strict=True):
            assert torch.equal(found, one)


def test_any_number_of_threads(built: Built) -> None:
    library, networks, _ = built
    fast = networks["nodes"]
    inputs = fast.program.example(4)
    expected = fast._run(inputs)
    for threads in (1, 3, 5):
        made = CNetwork(library, "nodes", threads)
        torch.testing.assert_close(made(inputs, expected), expected, rtol=1e-5, atol=1e-5)
        made.free()


def test_calls_from_several_threads(pair: tuple[CNetwork, EngineModel]) -> None:
    made, fast = pair
    cases = [fast.program.example(1 + i) for i in range(4)]
    expected = [fast._run(inputs) for inputs in cases]
    problems: list[int] = []

    def call(i: int) -> None:
        for _ in range(10):
            found = made(cases[i], expected[i])
            if not all(map(torch.equal, found, expected[i])):
                problems.append(i)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not problems


def test_invalid_arguments_return_an_error(pair: tuple[CNetwork, EngineModel]) -> None:
    made, fast = pair
    inputs = fast.program.example(2)
    outputs = fast._run(inputs)
    assert made.run(inputs, outputs, -1) == exported.INVALID_ARGUMENT
    assert made.run(inputs, outputs, 2**62) == exported.INVALID_ARGUMENT
    assert made.run([None], outputs, 2) == exported.INVALID_ARGUMENT
    assert made.run(inputs, [None], 2) == exported.INVALID_ARGUMENT
    assert made.run([None], [None], 0) == exported.OK  # there is nothing to read
    handle, made.handle = made.handle, None
    assert made.run(inputs, outputs, 2) == exported.INVALID_ARGUMENT
    made.free()  # nothing happens
    made.handle = handle


@pytest.mark.parametrize("threads", [-1, 0, 1025])
def test_invalid_threads(built: Built, threads: int) -> None:
    assert CNetwork(built[0], "gpt", threads).handle is None


@pytest.mark.parametrize("token", [-1, 20, 2**62])
def test_tokens_out_of_range_return_an_error(built: Built, token: int) -> None:
    made, fast = CNetwork(built[0], "gpt", 1), built[1]["gpt"]
    (tokens,) = fast.program.example(3)
    outputs = [torch.zeros_like(x) for x in fast._run([tokens])]
    tokens[2, 11] = token
    assert made.run([tokens], outputs, 3) == exported.INVALID_TOKEN
    assert not outputs[0].any()
    assert made.run([tokens], outputs, 2) == exported.OK
    made.free()


@pytest.fixture(scope="module")
def example(built: Built) -> Path:
    """The example program of the language model, which was exported last."""
    command = ["g++", "-std=c++17", *exported.STRICT, "example.cpp", "gpt.o", "-pthread", "-o", "example"]
    subprocess.run(command, cwd=built[2], check=True)
    return built[2] / "example"


def test_the_example_program(built: Built, example: Path) -> None:
    fast, folder = built[1]["gpt"], built[2]
    exported.check_equal(fast, folder)
    (tokens,) = fast.program.example(1)
    done = subprocess.run([example, "1", "2", "-"], input=tokens.numpy().tobytes(), capture_output=True)
    assert done.returncode == 0
    assert f"out: {float(fast(tokens).flatten()[0]):g} ".encode() in done.stdout
    assert subprocess.run([example], capture_output=True).returncode == 0  # zeros
    short = subprocess.run([example, "1", "2", "-"], input=b"1", capture_output=True)
    assert (short.returncode, short.stderr) == (1, b"the input is missing or too short\n")
    missing = subprocess.run([example, "1", "2", folder / "nothing"], capture_output=True)
    assert (missing.returncode, missing.stderr) == (1, b"the input is missing or too short\n")
    wrong = subprocess.run([example, "1", "2", "-"], input=(tokens - 30).numpy().tobytes(), capture_output=True)
    assert (wrong.returncode, wrong.stderr) == (exported.INVALID_TOKEN, b"error 2; see gpt.h\n")


def test_too_little_memory_returns_an_error(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1)).eval()
    fast = engine.compile(model, torch.zeros(1, 1, 600, 600), threads=2)  # several MB of maps for every thread
    fast.export(tmp_path, name="large")
    example = exported.build(tmp_path)
    found = set()
    for megabytes in range(50, 700, 25):  # every thread has memory of its own, and some more for batches
        limited = ["sh", "-c", f'ulimit -v {megabytes}000 && exec "$0" 20 20', str(example)]
        done = subprocess.run(limited, capture_output=True, text=True)
        found.add((done.returncode, done.stderr))
    assert found == {
        (1, "not enough memory, or not a valid number of threads\n"),
        (exported.OUT_OF_MEMORY, "error 3; see large.h\n"),
        (0, ""),
    }


@pytest.mark.skipif(not shutil.which("gcc"), reason="there is no C compiler")
def test_the_header_is_valid_c(built: Built) -> None:
    command = ["gcc", "-std=c99", *exported.STRICT, "-fsyntax-only", "-x", "c", "-"]
    text = b'#include "nodes.h"\n#include "gpt.h"\nint size = NODES_IN_X_SIZE;\n'
    subprocess.run(command, input=text, cwd=built[2], check=True)


def test_the_library_exports_the_c_functions_alone(built: Built) -> None:
    found = subprocess.run(
        ["nm", "-g", "--defined-only", "gpt.o"], cwd=built[2], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1] for line in found.stdout.splitlines() if line.split()[-2] in "TBD"}
    assert {name for name in names if not name.startswith("_ZN11wirings_gpt")} == {"gpt_create", "gpt_run", "gpt_free"}


def test_a_wrong_target_does_not_compile(tmp_path: Path) -> None:
    fast = exported.network("nodes")
    other = "sse" if kernels().wirings_lanes() > 4 else "avx512"  # type: ignore[union-attr]
    fast.export(tmp_path, target=other)
    done = subprocess.run(
        ["g++", "-std=c++17", "-march=native", "-fsyntax-only", "network.cpp"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert f"this network was exported for {TARGETS[other].title}" in done.stderr


def test_the_sizes_of_this_machine_are_those_of_a_target() -> None:
    library = kernels()
    assert library is not None
    assert KernelSizes.of(library) in [target.sizes for target in TARGETS.values()]


# ---- text and mistakes -----------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 9000)), max_size=12))
def test_words_as_text(runs: list[tuple[int, int]]) -> None:
    words = np.repeat(np.array([word for word, _ in runs], np.uint32), [count for _, count in runs])
    found: list[int] = []
    for text in as_text(words):
        assert len(text) < 2**16
        assert not set(text) & set('"\\?')
        i = 0
        while i < len(text):
            repeated = text[i] == "z"
            i += repeated
            word = 0
            for c in text[i : i + 5]:
                word = 85 * word + ord({"x": "?", "y": "\\"}.get(c, c)) - ord("#")
            found += [found[-1]] * word if repeated else [word]
            i += 5
    assert np.array_equal(np.array(found, np.uint32), words)


def test_weights_are_stored_once(tmp_path: Path) -> None:
    fast = exported.network("mobilenetv1_dnw")
    (segment,) = fast._segments
    assert segment.plan is not None
    assert segment.batch_plan is not None
    assert segment.plan.lowering.bands == 2  # so the two plans have different offsets
    image = NetworkImage()
    image.add_plan(segment.plan, segment.plan.machine)
    one = len(image.words)
    image.add_plan(segment.batch_plan, segment.plan.machine)
    edges = sum(int(o.weight.count_nonzero()) for o in fast.program.operations if isinstance(o, Conv))
    assert len(image.words) - one < 1.1 * edges  # the offsets alone
    assert one < 2.5 * edges


def test_segments_without_pytorch() -> None:
    assert [segment.plan is not None for segment in exported.network("segments")._segments] == [True, True]


@pytest.mark.parametrize("name", ["", "1st", "a b", "a__b", "_a", "a_", "ü", "x;int main(){", None, "a" * 61])
def test_names_that_are_no_identifiers(name: Any, tmp_path: Path) -> None:
    with pytest.raises(WiringError, match="name must be letters, digits and single underscores"):
        exported.network("nodes").export(tmp_path / "new", name=name)
    assert not (tmp_path / "new").exists()


def test_mistakes(tmp_path: Path) -> None:
    fast = exported.network("nodes")
    with pytest.raises(WiringError, match='name must not be "example"'):
        fast.export(tmp_path, name="Example")
    with pytest.raises(WiringError, match="unknown target 'avx'"):
        fast.export(tmp_path, target="avx")
    (tmp_path / "file").write_text("")
    with pytest.raises(WiringError, match="expected a folder to export to, got the file"):
        fast.export(tmp_path / "file")
    with pytest.raises(WiringError, match="this network runs on PyTorch"):
        engine.compile(fast.program, engine="torch").export(tmp_path)


def test_the_docs_show_the_command_that_builds_the_example(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "engine.md"
    command = exported.command(exported.network("nodes").export(tmp_path))
    assert f"\n{' '.join(command)}\n" in page.read_text()


def test_operators_on_pytorch_are_named(tmp_path: Path) -> None:
    operations = [
        Activation("a", ("x",)),
        TorchOperator("b", ("a",), "aten::flip", (InputRef(0), (1,))),
        TorchOperator("c", ("b",), "aten::roll", (InputRef(0), (1,), (2,))),
    ]
    fast = engine.compile(Program({"x": (3, 4, 4)}, operations, ("c",)), engine="sparse", threads=1)
    with pytest.raises(WiringError, match="these operators run on PyTorch: aten::flip, aten::roll"):
        fast.export(tmp_path)
    assert not list(tmp_path.iterdir())


def test_names_of_tensors_cannot_inject_code(tmp_path: Path) -> None:
    odd = 'x */ int y; \\\n"#'
    operations = [
        Activation("first */", (odd,)),
        Activation("second", ("first */",), "tanh"),
        Linear("x;", ("z",), torch.ones(2, 3)),
    ]
    program = Program({odd: (3, 4, 4), "z": (3,)}, operations, ("second", "x;"), {})
    engine.compile(program, engine="sparse", threads=1).export(tmp_path)
    header = (tmp_path / "network.h").read_text()
    assert "const float *in_x_int_y, const float *in_z, float *out_0, float *out_1" in header
    assert "*/ int" not in header
    for file in ("network.h", "example.cpp"):
        subprocess.run(
            ["g++", "-std=c++17", *exported.STRICT, "-fsyntax-only", "-x", "c++", file], cwd=tmp_path, check=True
        )


def test_outputs_have_the_names_that_the_model_gives_them(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 1)

        def forward(self, image: Tensor) -> dict[str, Tensor]:
            maps = self.layer(image)
            return {"maps": maps, "logits": maps.relu().mean((2, 3))}

    engine.compile(Two(), torch.randn(1, 3, 4, 4), engine="sparse", threads=1).export(tmp_path)
    assert "float *out_maps, float *out_logits" in (tmp_path / "network.h").read_text()
