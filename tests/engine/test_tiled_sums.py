"""Sums over edges in narrow tiles."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.in_tiles import in_tiles
from tests.engine.random_programs import RandomProgram
from tests.engine.test_kernels import nodes
from wirings import engine
from wirings.compaction.operations import Activation, Add, Conv, Mean
from wirings.compaction.program import Program
from wirings.engine.tiled_sums import FIRST, LAST, NOT_TILED, TILE, TILED, tiled_fields

needs_compiler = pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")


def edge_fields(edges: list[tuple[int, int, float]], rows: int) -> dict[str, object]:
    """The fields of `EdgeGroups` for edges (row, place, weight), sorted by row and place."""
    row = np.array([r for r, _, _ in edges], int)
    records = np.zeros((len(edges), 2), np.int32)
    records[:, 0] = [place for _, place, _ in edges]
    records[:, 1] = np.array([weight for *_, weight in edges], np.float32).view(np.int32)
    starts = 2 * np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))])
    return {"starts": starts, "records": records, "tiled": NOT_TILED}


def test_segments_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows in two tasks, over inputs at 0, 100 and 200, of which two fit into a tile."""
    monkeypatch.setattr("wirings.engine.tiled_sums.TILE_BYTES", 2 * 4 * TILE * 4)
    edges = [(0, 0, 1.0), (0, 100, 2.0), (0, 200, 3.0), (2, 100, 4.0), (3, 0, 5.0), (3, 100, 6.0), (4, 200, 7.0)]
    tiled = tiled_fields(edge_fields(edges, 5), np.array([0, 4, 5]), lanes=4)["tiled"]
    np.testing.assert_array_equal(tiled["starts"], [[0, 0, 0], [5, 6, 6], [6, 7, 7]])
    expected = [
        [1, 2, FIRST],  # rows 0 and 3 in the block of the first input
        [0, 1, FIRST + LAST],  # row 1, which has no edges
        [2, 1, LAST],  # row 0 in the block of the others
        [1, 1, LAST],  # row 3
        [1, 1, FIRST + LAST],  # row 2
        [1, 1, FIRST + LAST],  # row 4, in the second task
    ]
    np.testing.assert_array_equal(tiled["segments"], expected)
    np.testing.assert_array_equal(tiled["rows"], [0, 3, 1, 0, 3, 2, 4])
    np.testing.assert_array_equal(tiled["places"], [0, 0, 100, 200, 100, 100, 200])
    np.testing.assert_array_equal(tiled["weights"][:7], [1, 5, 2, 3, 6, 4, 7])


@given(
    rows=st.integers(1, 40),
    places=st.integers(1, 60),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    tile_bytes=st.sampled_from([1, 600, 5000, 10**6]),
    seed=st.integers(0, 10**6),
)
def test_every_edge_once_and_every_row_begun_and_ended_once(
    rows: int, places: int, density: float, tile_bytes: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    weights = random.normal(size=(rows, places)).astype(np.float32) * (random.random((rows, places)) < density)
    row, place = np.nonzero(weights)
    edges = [(int(r), 7 * int(p), float(weights[r, p])) for r, p in zip(row, place, strict=True)]
    chunks = np.unique([0, *random.integers(0, rows + 1, 3), rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wirings.engine.tiled_sums.TILE_BYTES", tile_bytes)
        tiled = tiled_fields(edge_fields(edges, rows), chunks, lanes=4)["tiled"]
    found, begun, ended = np.zeros_like(weights), np.zeros(rows, int), np.zeros(rows, int)
    for chunk in range(len(chunks) - 1):
        segment, entry, edge = tiled["starts"][chunk]
        for count, entries, flags in tiled["segments"][segment : tiled["starts"][chunk + 1][0]]:
            for _ in range(entries):
                own = tiled["rows"][entry]
                assert chunks[chunk] <= own < chunks[chunk + 1]
                assert begun[own] == (0 if flags & FIRST else 1)
                assert ended[own] == 0
                begun[own] += bool(flags & FIRST)
                ended[own] += bool(flags & LAST)
                read = tiled["places"][edge : edge + count] // 7
                found[own, read] += tiled["weights"][edge : edge + count]
                entry, edge = entry + 1, edge + count
        np.testing.assert_array_equal([entry, edge], tiled["starts"][chunk + 1][1:])
    np.testing.assert_array_equal(found, weights)
    assert (begun == 1).all()
    assert (ended == 1).all()


def layers(seed: int, channels: int, size: tuple[int, int], density: float) -> Program:
    """Convolutions with borders, strides and a residual, and means: all that may become of sums."""
    made = RandomProgram(seed, (channels, *size))

    def conv(name: str, source: str, out: int, kernel: int, stride: int = 1) -> str:
        inputs = made.shapes[source][0]
        weight = made.weight(out, inputs, kernel, kernel, density=density)
        return made.add(Conv(name, (source,), weight, made.normal(out), (stride,) * 2, (kernel // 2,) * 2))

    first = made.add(Activation("relu0", (conv("a", "x", 13, 1),)))
    second = conv("c", made.add(Activation("relu1", (conv("b", first, 17, 3),))), 13, 3)
    both = made.add(Activation("relu2", (made.add(Add("sum", (second, first))),)))
    strided = conv("e", made.add(Activation("relu3", (conv("d", both, 11, 1),))), 9, 3, 2)
    made.add(Mean("mean", (made.add(Activation("relu4", (strided,))),)))
    shortcut = conv("f", both, 9, 1, 2)
    return Program(made.inputs, made.operations, ("mean", shortcut))


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    channels=st.integers(1, 40),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    density=st.sampled_from([0.2, 0.5]),
    tile_bytes=st.sampled_from([500, 5000, 10**6]),
    threads=st.integers(1, 3),
    batch=st.sampled_from([1, 3]),
)
def test_tiles_compute_what_pytorch_does(
    seed: int, channels: int, size: tuple[int, int], density: float, tile_bytes: int, threads: int, batch: int
) -> None:
    program = layers(seed, channels, size, density)
    made = engine.compile(program, engine="sparse", threads=threads)
    assert in_tiles(made, tile_bytes) > 0 or density < 0.5
    images = torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(seed))
    for found, expected in zip(made(images), program.run(images), strict=True):
        assert float((found - expected).abs().max()) <= 1e-5 * max(float(expected.abs().max()), 1e-2)


@needs_compiler
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    widths=st.lists(st.integers(16, 40), min_size=2, max_size=4),
    stride=st.integers(1, 2),
    tile_bytes=st.sampled_from([500, 5000, 10**6]),
    chunk_bytes=st.sampled_from([1000, 10**6]),
    threads=st.integers(1, 3),
    batch=st.sampled_from([1, 3]),
)
def test_nodes_in_tiles_compute_what_pytorch_does(
    seed: int,
    size: tuple[int, int],
    widths: list[int],
    stride: int,
    tile_bytes: int,
    chunk_bytes: int,
    threads: int,
    batch: int,
) -> None:
    program = nodes(seed, size, widths, stride, 0.4)
    made = engine.compile(program, engine="sparse", threads=threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wirings.engine.tiled_sums.CHUNK_BYTES", chunk_bytes)
        in_tiles(made, tile_bytes)
    chosen = [
        (step.kind, choice.way) for plan in made._plans() for step, choice in zip(plan.steps, plan.choices, strict=True)
    ]
    assert ("nodes", TILED) in chosen
    images = torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(seed))
    found, expected = made(images), program.run(images)[0]
    assert float((found - expected).abs().max()) <= 1e-5 * max(float(expected.abs().max()), 1e-2)


@needs_compiler
def test_nan_passes_through_tiles() -> None:
    weight = torch.zeros(2, 8, 1, 1)
    weight[0, :4], weight[1, 4:] = 1, -1
    program = Program({"x": (8, 5, 5)}, [Conv("y", ("x",), weight), Activation("z", ("y",))], ("z",))
    made = engine.compile(program, engine="sparse", threads=1)
    images = torch.randn(1, 8, 5, 5)
    images[0, [0, 4], 0, 0] = torch.nan  # of both rows, since PyTorch multiplies NaN by zeros, too
    assert in_tiles(made)
    torch.testing.assert_close(made(images), program.run(images)[0], equal_nan=True)


@needs_compiler
def test_rows_with_few_edges_are_not_tiled() -> None:
    """Each would be loaded and stored more often than it is added to."""
    weight = torch.eye(8).reshape(8, 8, 1, 1)
    program = Program({"x": (8, 6, 6)}, [Conv("y", ("x",), weight)], ("y",))
    assert in_tiles(engine.compile(program, engine="sparse", threads=1)) == 0
