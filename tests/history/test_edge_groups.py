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
