"""Groups on the vector of a graph's edges are chosen as a naive implementation chooses them."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wirings import Blocks, Dag, WiringError
from wirings.graph.topology import Complete, EdgeTile, Matrix
from wirings.selection.graph_groups import GraphGroups, lay_over_graph
from wirings.selection.structure import Structure


def laid(text: str, tiles: list[EdgeTile], allowed: Tensor | None = None) -> Any:
    structure = Structure.of(text)
    assert structure is not None
    return lay_over_graph(structure, "graph.weight", tiles, allowed)


def random_tiles(draw: Any) -> list[EdgeTile]:
    """The tiles of a graph of any topology."""
    kind, seed = draw(st.sampled_from(["blocks", "dag", "static", "dynamic"])), draw(st.integers(0, 10**6))
    if kind == "blocks":
        sizes = draw(st.lists(st.integers(1, 6), min_size=2, max_size=4))
        return Blocks(sizes, draw(st.sampled_from([None, 1, 2]))).tiles()
    if kind == "dag":
        return Dag(draw(st.integers(3, 40)), inputs=2).tiles()
    nodes = draw(st.integers(3, 12))
    allowed = np.random.default_rng(seed).random((nodes, nodes)) < draw(st.sampled_from([0.2, 0.7, 1.0]))
    allowed[-1, 0] = True
    if kind == "dynamic":
        return Matrix(allowed).tiles()
    allowed &= np.tril(np.ones_like(allowed), -1)
    shuffled = np.random.default_rng(seed).permutation(nodes)  # so that the order of the nodes is not their numbers
    groups = Matrix(allowed[shuffled][:, shuffled]).groups(np.flatnonzero(shuffled == 0), "StaticGraph")[1]
    return [tile for group in groups for tile in (group.far, group.near) if tile is not None]


def members(structure: Structure, tiles: list[EdgeTile]) -> dict[Any, list[int]]:
    """The edges of each group, in the order of the groups' positions."""
    found: dict[Any, list[int]] = {}
    edge = 0
    for number, tile in enumerate(tiles):
        rows, columns = len(tile.targets), len(tile.sources)
        pairs = [(row, column) for row in range(rows) for column in range(columns)]
        for row, column in pairs if tile.places is None else zip(*tile.places, strict=True):
            key: Any = int(tile.targets[row]) if structure.text == "row" else int(tile.sources[column])
            if structure.nm is not None:
                key = (number, row, column // structure.nm[1])
            elif structure.block[0] is not None and structure.block[1] is not None:
                key = (number, row // structure.block[0], column // structure.block[1])
            found.setdefault(key, []).append(edge)
            edge += 1
    return dict(sorted(found.items()))


def naive(found: dict[Any, list[int]], weight: Tensor, k: int, allowed: Tensor | None) -> Tensor:
    """The k groups with the largest root mean square, in Python and double precision."""
    own = {key: [e for e in edges if allowed is None or allowed[e]] for key, edges in found.items()}
    scores = {key: sum(float(weight[e]) ** 2 for e in edges) / len(edges) for key, edges in own.items() if edges}
    real = torch.zeros(len(weight), dtype=torch.bool)
    for key in sorted(scores, key=lambda key: -scores[key])[:k]:  # a stable sort: the earlier of equal ones
        real[own[key]] = True
    return real


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_equal_a_naive_reference(data: Any) -> None:
    tiles = random_tiles(data.draw)
    text = data.draw(st.sampled_from(["row", "column", "1x1", "2x3, padded", "3x1, padded", "50x2, padded"]))
    edges = sum(tile.count for tile in tiles)
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    with_ties = data.draw(st.booleans())
    weight = torch.randint(-1, 2, (edges,)).float() if with_ties else torch.randn(edges)
    allowed = torch.rand(edges) < 0.6 if data.draw(st.booleans()) else None
    if allowed is not None:
        allowed[0] = True
    groups = laid(text, tiles, allowed)
    structure = Structure.of(text)
    assert structure is not None
    found = members(structure, tiles)
    assert groups.possible == sum(1 for own in found.values() if allowed is None or allowed[own].any())
    assert groups.edges == (edges if allowed is None else int(allowed.sum()))
    assert groups.equal == (allowed is None and len({len(own) for own in found.values()}) == 1)
    k = data.draw(st.integers(0, groups.possible))
    real = groups.choose(weight, k, allowed, allowed)
    assert torch.equal(real, naive(found, weight, k, allowed))
    assert int(groups.count(real)) == k
    assert groups.whole(real, allowed)
    part = real & (torch.rand(edges) < 0.5)
    completed = groups.complete(part, 0, allowed)
    assert not (completed & ~real).any()
    assert int(groups.count(completed)) == sum(1 for own in found.values() if part[own].any())
    drawn = groups.draw(torch.Generator().manual_seed(1))
    assert all(len(set(drawn[own].tolist())) == 1 for own in found.values())
    assert len(set(drawn.tolist())) == len(found)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_nm_equals_a_naive_reference(data: Any) -> None:
    m = data.draw(st.integers(1, 4))
    sizes = [m * data.draw(st.integers(1, 3)) for _ in range(data.draw(st.integers(1, 3)))]
    tiles = Blocks([*sizes, data.draw(st.integers(1, 5))]).tiles()
    n = data.draw(st.integers(1, m))
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    weight = torch.randint(-3, 4, (sum(tile.count for tile in tiles),)).float()  # with ties
    structure = Structure.of(f"{n}:{m}")
    assert structure is not None
    expected = torch.zeros(len(weight), dtype=torch.bool)
    for own in members(structure, tiles).values():
        expected[sorted(own, key=lambda e: -abs(float(weight[e])))[:n]] = True
    groups = laid(structure.text, tiles)
    real = groups.choose(weight, n, None, None)
    assert torch.equal(real, expected)
    assert int(groups.count(real)) == n
    assert groups.whole(real, None)
    assert groups.draw().shape == weight.shape


def test_by_hand() -> None:
    tiles = Blocks([2, 2, 1]).tiles()  # nodes 2 and 3 receive from 0 and 1; node 4 from 0 to 3
    weight = torch.tensor([1.0, 2, 3, 4, 9, 0, 0, 5])

    def chosen(text: str, k: int) -> list[int]:
        return laid(text, tiles).choose(weight, k, None, None).int().tolist()

    assert chosen("row", 1) == [0, 0, 0, 0, 1, 1, 1, 1]  # mean squares 2.5, 12.5 and 26.5
    assert chosen("row", 2) == [0, 0, 1, 1, 1, 1, 1, 1]
    assert chosen("column", 1) == [1, 0, 1, 0, 1, 0, 0, 0]  # 91 / 3, 20 / 3, 0 and 25
    assert chosen("column", 2) == [1, 0, 1, 0, 1, 0, 0, 1]
    assert chosen("1x2", 2) == [0, 0, 1, 1, 1, 1, 0, 0]  # 2.5, 12.5, 40.5 and 12.5: of equal ones, the first
    assert chosen("1x2", 3) == [0, 0, 1, 1, 1, 1, 1, 1]
    assert chosen("2x2, padded", 2) == [0, 0, 0, 0, 1, 1, 1, 1]  # 7.5; below the border, 40.5 and 12.5
    assert chosen("1:2", 1) == [0, 1, 0, 1, 1, 0, 0, 1]


def test_the_equal_go_by_position() -> None:
    tiles = Dag(5, inputs=2).tiles()  # a far tile of 3 × 2 edges, then the edges 3 → 2, 4 → 2, 4 → 3
    real = laid("2x2, padded", tiles).choose(torch.ones(9), 2, None, None)
    assert real.tolist() == [True] * 6 + [False] * 3
    assert laid("row", tiles).choose(-torch.ones(9).half(), 1, None, None).nonzero().flatten().tolist() == [0, 1]
    assert laid("column", tiles).choose(torch.zeros(9), 1, None, None).nonzero().flatten().tolist() == [0, 2, 4]


@pytest.mark.parametrize("sizes", [[1], [1, 33], [5000, 1, 40], [1024, 1025], [2] * 100])
def test_sums_of_groups_of_any_size(sizes: list[int]) -> None:
    of_edges = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    groups, values = GraphGroups(of_edges), torch.rand(len(of_edges), dtype=torch.float64)
    expected = torch.tensor([values[torch.from_numpy(of_edges == i)].sum() for i in range(len(sizes))])
    torch.testing.assert_close(groups._sums(values).float(), expected.float())
    assert groups._sizes(values, None).tolist() == sizes
    places = sum(table.numel() for table in groups._tables[0].sums)
    assert places <= 2 * len(of_edges) + 40 * len(sizes), "a group of thousands beside small ones takes no more"


def test_extreme_weights_are_ranked() -> None:
    tiles = Complete(4).tiles()
    for size in (1e-24, 3e25):
        weight = torch.full((16,), size / 1e5)
        weight[4:8] = size
        assert laid("row", tiles).choose(weight, 1, None, None).nonzero().flatten().tolist() == [4, 5, 6, 7]


def test_a_threshold_shrinks_groups_as_a_whole() -> None:
    groups, weight = laid("row", Blocks([2, 2]).tiles()), torch.tensor([3.0, -4.0, 1.0, 1.0])
    real = groups.choose(weight, 1, None, None)
    ratio = 1 / 12.5**0.5  # of the root mean squares
    threshold = groups.next_magnitude(weight, real, None, None)
    torch.testing.assert_close(threshold[real], torch.tensor([3 * ratio, 4 * ratio]))


@pytest.mark.parametrize(
    ("text", "tiles", "says"),
    [
        ("4x4", Blocks([4, 8, 6]).tiles(), "blocks of 4 receiving and 4 sending nodes do not divide the tiles of "
         'graph.weight, which have 8 × 4, 6 × 12 nodes. The nearest block that does is "2x4". "4x4, padded" makes .*'
         r"drop structure=, or leave the graph as it is with skip=\['graph.weight'\]"),
        ("2x2", Dag(100, inputs=3).tiles(), r'32 × 3, 32 × 32, 32 × 35, 32 × 67, … \(7 tiles\) .* is "1x1"'),
        ("2:4", Blocks([3, 6, 2]).tiles(), "keeps 2 of every 4 neighbouring nodes that send to a node, but 4 does not "
         r"divide the sending nodes of the tiles of graph.weight, which have 6 × 3, 2 × 9 nodes \(receiving × sending\)"
         ". The nearest M that does is 3"),
        ("2:4", Blocks([4, 7, 2]).tiles(), "No M does"),
        ("2:4", Dag(8, inputs=4).tiles(), 'allows only some of the edges .* Use "row", "column" or blocks such as '
         '"4x4, padded", or a graph of blocks'),
    ],
)  # fmt: skip
def test_structures_that_do_not_fit(text: str, tiles: list[EdgeTile], says: str) -> None:
    with pytest.raises(WiringError, match=says):
        laid(text, tiles)


def test_nm_needs_all_edges() -> None:
    with pytest.raises(WiringError, match=r"allowed= excludes edges of graph.weight"):
        laid("2:4", Blocks([4, 2]).tiles(), torch.rand(8) < 0.9)
