"""Histories, pictures and pages of wirings in blocks know them."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import wirings
from wirings.draw import html
from wirings.draw.by_layer import _density_table, layers
from wirings.draw.coarsen import NodeBins
from wirings.draw.terminal import summary
from wirings.history import History
from wirings.history.check_structure import check_structure
from wirings.history.snapshot import snapshot_of


def recorded(structure: str, **more: object) -> tuple[nn.Module, wirings.Wiring, History]:
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
    wiring = wirings.wire_(model, "dnw", structure=structure, **({"density": 0.5} | more))  # type: ignore[arg-type]
    return model, wiring, wirings.Recorder(wiring).history()


@pytest.mark.parametrize("structure", ["4x2", "row", "3x4, padded"])
def test_blocks_are_counted(structure: str) -> None:
    _, wiring, history = recorded(structure)
    assert history.structure.edge_groups == structure
    counts = history.state().block_counts()
    if structure == "row":
        assert counts is None
        return
    assert counts is not None
    assert [real for real, _ in counts] == [report.groups for report in wiring.look()]
    assert [possible for _, possible in counts] == [layer.edges.possible for layer in wiring.layers]


def test_files_and_snapshots_keep_them(tmp_path: Path) -> None:
    model, _, history = recorded("4x2")
    again = History.load(history.save(tmp_path / "a.wirings"))
    assert (again.structure.edge_groups, again.structure.block) == ("4x2", (4, 2))
    assert snapshot_of(model).structure.edge_groups == "4x2"
    _, _, free = recorded("free")
    assert "edge_groups" not in free.structure.to_json()  # files of free edges are as before
    assert free.structure.block is None
    damaged = type(free.structure).from_json({**free.structure.to_json(), "edge_groups": "0x0"})
    with pytest.raises(ValueError, match="unknown groups of edges"):
        check_structure(damaged)


ALLOWED = torch.rand(30, 30, generator=torch.Generator().manual_seed(0)) < 0.2
GRAPHS = {
    "blocks": lambda: wirings.StaticGraph([4, 9, 7, 5]),
    "dag": lambda: wirings.StaticGraph(topology=wirings.Dag(48, inputs=4), outputs=4),
    "matrix": lambda: wirings.StaticGraph(
        topology=ALLOWED.tril(-1) & (torch.arange(30) >= 4)[:, None], inputs=4, outputs=4
    ),
    "complete": lambda: wirings.DiscreteGraph(12, inputs=4, outputs=4, steps=2),
    "sparse": lambda: wirings.DiscreteGraph(topology=ALLOWED, inputs=4, outputs=4, steps=2),
}


@pytest.mark.parametrize("kind", GRAPHS)
def test_blocks_of_graphs_are_counted(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), GRAPHS[kind]())
    wiring = wirings.wire_(model, structure="4x3, padded", density=0.4)
    history = wirings.Recorder(wiring).history()
    expected = [
        (report.groups, layer.edges.possible) for report, layer in zip(wiring.look(), wiring.layers, strict=True)
    ]
    assert history.state().block_counts() == expected
    again = History.load(history.save(tmp_path / "a.wirings"))
    assert again.state().block_counts() == expected
    assert again.structure.same_edges(history.structure)
    real, possible = (sum(side) for side in zip(*expected, strict=True))
    assert f"dnw in 4x3, padded, {history.structure.nodes} nodes" in summary(history)
    assert f", {real} of {possible} blocks" in summary(history)
    layers(Figure(), history)
    assert len(html._page_data(history)) > 0


def test_rectangles_of_listed_edges_are_stored_for_blocks_only() -> None:
    for structure, stored in (("free", False), ("row", False), ("2x2, padded", True)):
        graph = GRAPHS["sparse"]()
        history = wirings.Recorder(wirings.wire_(graph, structure=structure, density=0.5)).history()
        tile = history.structure.to_json()["tiles"][0]
        assert ("sides" in tile) == stored
    damaged = history.structure.to_json()
    damaged["tiles"][0]["sides"][0] = damaged["tiles"][0]["sides"][0][:5]
    with pytest.raises(ValueError, match="an edge is outside of its rectangle"):
        check_structure(type(history.structure).from_json(damaged))
    del damaged["tiles"][0]["sides"]
    unknown = History(type(history.structure).from_json(damaged), history.about, history.chunks)
    assert unknown.state().block_counts() is None


def test_summary_and_page_name_them() -> None:
    _, _, history = recorded("4x2")
    assert "rule dnw in 4x2, " in summary(history)
    assert ", 9 of 18 blocks" in summary(history)
    assert json.dumps("dnw in 4x2").encode() in zlib.decompress(html._page_data(history))


def test_pictures_draw_whole_blocks() -> None:
    _, _, history = recorded("4x2")
    state = history.state()
    table = _density_table(state, 0)
    assert table.shape == (3, 4)
    assert set(np.unique(table)) == {0.0, 1.0}
    layers(Figure(), history)
    bins = NodeBins(history.structure, dots=2)
    assert bins.size % 4 == 0
    assert bins.structure.edge_groups == "4x2"


@pytest.mark.parametrize("structure", ["2:4", "2:4, transposable"])
def test_n_of_m_has_no_blocks(structure: str) -> None:
    torch.manual_seed(0)
    _, _, history = recorded(structure)
    assert history.structure.edge_groups == structure
    assert history.state().block_counts() is None
    assert f"rule dnw in {structure}" in summary(history)
