"""Picking and summing tokens at indices in the engine: as PyTorch does, and with errors for indices out of range."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine import exported
from tests.engine.exported import INVALID_TOKEN, OK, CNetwork
from wirings import WiringError, engine
from wirings.compaction.operations import Add, PickTokens, SumTokens
from wirings.compaction.program import Program

pytestmark = pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")


@settings(max_examples=60)
@given(
    channels=st.integers(1, 40),
    tokens=st.integers(1, 40),
    count=st.integers(1, 90),
    sums=st.integers(1, 50),
    kind=st.sampled_from(["picked", "summed", "both", "both, and picked"]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_any_indices(channels: int, tokens: int, count: int, sums: int, kind: str, threads: int, seed: int) -> None:
    torch.manual_seed(seed)
    tokens = count if kind == "summed" else tokens
    pick, add = PickTokens("picked", ("x", "index"), 0, count, tokens), ("index",)
    source = "x" if kind == "summed" else "picked"
    total = SumTokens("summed", (source, *add), count, count, sums)
    operations = {"picked": [pick], "summed": [total]}.get(kind, [pick, total])
    outputs = {"picked": ("picked",), "both, and picked": ("picked", "summed")}.get(kind, ("summed",))
    shapes = {"x": (channels, tokens), "index": (2, count)}
    program = Program(shapes, operations, outputs, {"types": {"index": "torch.int64"}})
    fast = engine.compile(program, engine="sparse", threads=threads)
    assert not fast.uses_torch
    for batch in (1, 4):
        index = torch.stack([torch.randint(n, (batch, count)) for n in (tokens, sums)], 1)
        x = torch.randn(batch, channels, tokens)
        found = fast(x, index)
        found = found if isinstance(found, tuple) else (found,)
        for one, two in zip(found, program.run(x, index), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_indices_out_of_range(tmp_path: Path) -> None:
    """Only those that are read have to be in range, and each has a range of its own."""
    fast = exported.network("graph")
    x, edges = torch.randn(2, 19, 20), torch.zeros(2, 3, 50, dtype=torch.int64)
    edges[:, 1], edges[:, 2] = 22, 1000
    expected = fast(x, edges)
    torch.testing.assert_close(expected, fast.program.run(x, edges)[0], rtol=1e-5, atol=1e-5)
    for row, value, message in ((0, 20, "0 to 19, got 0 to 20"), (0, -1, "0 to 19, got -1"), (1, 23, "0 to 22, got")):
        wrong = edges.clone()
        wrong[1, row, 7] = value
        with pytest.raises(WiringError, match=f"expects indices in edges from {message}"):
            fast(x, wrong)
        with pytest.raises(WiringError, match=f"expects indices in edges from {message}"):
            engine.compile(fast.program, engine="torch")(x, wrong)


@exported.needs_gpp
def test_exported_networks_check_indices(tmp_path: Path) -> None:
    import ctypes
    import subprocess

    fast = exported.network("graph")
    folder = fast.export(tmp_path)
    command = [part for part in exported.command(folder) if part != "example.cpp"][:-2]
    subprocess.run([*command, *exported.STRICT, "-fPIC", "-shared", "-o", "made.so"], cwd=folder, check=True)
    made = CNetwork(ctypes.CDLL(str(folder / "made.so")), "network", threads=2)
    x, edges = torch.randn(2, 19, 20), torch.zeros(2, 3, 50, dtype=torch.int64)
    edges[:, 2] = 1000
    out = torch.empty(2, 19, 23)
    assert made.run([x, edges], [out], 2) == OK
    assert torch.equal(out, fast(x, edges))
    edges[1, 1, 49] = 23
    assert made.run([x, edges], [out], 2) == INVALID_TOKEN
    made.free()


def test_sums_are_added_to_what_was_there() -> None:
    operations = [SumTokens("sums", ("y", "index"), 0, 3, 5), Add("z", ("x", "sums"))]
    shapes = {"x": (4, 5), "y": (4, 3), "index": (3,)}
    program = Program(shapes, operations, ("z",), {"types": {"index": "torch.int64"}})
    inputs = torch.randn(2, 4, 5), torch.randn(2, 4, 3), torch.tensor([[4, 0, 4], [1, 1, 1]])
    torch.testing.assert_close(engine.compile(program, threads=2)(*inputs), program.run(*inputs)[0])
