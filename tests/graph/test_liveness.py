"""Liveness of graphs, compared with all paths and walks listed one by one."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wirings.graph.liveness import path_liveness, reached, step_liveness

NODES = 4
PAIRS = list(itertools.product(range(NODES), repeat=2))
some_nodes = st.lists(st.integers(0, NODES - 1), min_size=1, max_size=2, unique=True).map(np.array)
some_edges = st.lists(st.sampled_from(PAIRS), max_size=7, unique=True)


def ends(edges: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.array(edges, int).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def test_reached_includes_the_start() -> None:
    sources, targets = ends([(0, 1), (1, 2), (3, 0)])
    assert reached(np.array([0]), sources, targets, NODES).tolist() == [True, True, True, False]
    assert reached(np.array([3]), *ends([]), NODES).tolist() == [False, False, False, True]


def test_a_path_by_hand() -> None:
    # 0 → 1 → 3 (output); 2 leads to 3, but no input leads to it; 0 → 2 is missing
    found = path_liveness(*ends([(0, 1), (1, 3), (2, 3)]), NODES, np.array([0]), np.array([3]))
    assert found.nodes.tolist() == [True, True, False, True]
    assert found.edges.tolist() == [[True, True, False]]
    assert found.sends.tolist() == [[True, True, False, False]], "an output sends nothing"
    assert found.fed.tolist() == [True, True, False, True]
    assert found.used.tolist() == [True, True, True, True]


def test_an_input_that_is_an_output_needs_an_edge_only_in_steps() -> None:
    both = np.array([0])
    assert path_liveness(*ends([]), NODES, both, both).nodes.tolist() == [True, False, False, False]
    for steps in (2, None):
        assert not step_liveness(*ends([]), NODES, both, both, steps=steps, input_steps=None).nodes.any()


@pytest.mark.parametrize("read_every_step", [False, True])
@pytest.mark.parametrize("input_steps", [1, 2, None])
@given(some_edges, some_nodes, some_nodes, st.integers(1, 3))
def test_steps_against_all_walks(
    input_steps: int | None,
    read_every_step: bool,
    edges: list[tuple[int, int]],
    inputs: np.ndarray,
    outputs: np.ndarray,
    steps: int,
) -> None:
    fed_steps = steps if input_steps is None else input_steps
    alive = np.zeros((steps, len(edges)), bool)
    nodes, fed, used = (np.zeros(NODES, bool) for _ in range(3))
    for start, length in itertools.product(range(min(fed_steps, steps)), range(1, steps + 1)):
        stop = start + length
        if stop > steps or (stop < steps and not read_every_step):
            continue
        for walk in itertools.product(range(len(edges)), repeat=length):
            if any(edges[a][1] != edges[b][0] for a, b in itertools.pairwise(walk)):
                continue
            first, last = edges[walk[0]][0], edges[walk[-1]][1]
            fed[last] |= first in inputs
            used[first] |= last in outputs
            if first in inputs and last in outputs:
                alive[np.arange(start, stop), list(walk)] = True
                nodes[[first, *(edges[i][1] for i in walk)]] = True
    found = step_liveness(
        *ends(edges), NODES, inputs, outputs, steps=steps, input_steps=input_steps, read_every_step=read_every_step
    )
    assert np.array_equal(found.edges, alive)
    assert np.array_equal(found.nodes, nodes)
    assert np.array_equal(found.fed, fed)
    assert np.array_equal(found.used, used)


@given(some_edges, some_nodes, some_nodes)
def test_any_number_of_steps_is_the_union_of_long_sequences(
    edges: list[tuple[int, int]], inputs: np.ndarray, outputs: np.ndarray
) -> None:
    graph = (*ends(edges), NODES, inputs, outputs)
    long = step_liveness(*graph, steps=3 * NODES, input_steps=None, read_every_step=True)
    found = step_liveness(*graph, steps=None)
    assert np.array_equal(found.nodes, long.nodes)
    assert np.array_equal(found.edges[0], long.edges.any(0))
