"""What the HTML page of a transformer shows: counts by block, kind of layer and head, not single edges.

The page therefore stays small and fast however many edges there are.
"""

from __future__ import annotations

from typing import Any

from wirings.draw.common import rule_label
from wirings.history import History
from wirings.history.blocks import column_name
from wirings.history.heads import HeadCounts, count_edges


def block_data(history: History) -> dict[str, Any]:
    """The data of the page, as JSON values."""
    structure = history.structure
    counts = count_edges(structure, history.states())
    found = counts.transformer
    names = [layer.name.removesuffix(".weight") for layer in structure.layers]
    cells = [
        {
            "block": cell.block,
            "column": found.columns.index(cell.column),
            "layers": [names[layer] for layer, _ in cell.parts],
            "edges": cell.edges,
            "real": counts.real[:, i].tolist(),
        }
        for i, cell in enumerate(found.cells)
    ]
    outside = [
        {
            "layers": [names[layer]],
            "edges": structure.layers[layer].stop - structure.layers[layer].start,
            "real": counts.outside[:, i].tolist(),
        }
        for i, layer in enumerate(found.outside)
    ]
    return {
        "about": {**history.about, **({"rule": rule_label(history)} if "rule" in history.about else {})},
        "notes": history.notes,
        "steps": history.steps,
        "births": history.births.tolist(),
        "edges": structure.edges,
        "real": (counts.real.sum(1) + counts.outside.sum(1)).tolist(),
        "blocks": found.blocks,
        "columns": [[family, kind, column_name(family, kind)] for family, kind in found.columns],
        "cells": cells,
        "outside": outside,
        "attentions": [_attention_data(heads) for heads in counts.heads],
    }


def _attention_data(heads: HeadCounts) -> dict[str, Any]:
    records = len(heads.edges)
    return {
        "block": heads.attention.block,
        "family": heads.attention.family,
        "heads": heads.attention.heads,
        "possible": heads.possible.tolist(),
        "edges": heads.edges.reshape(records, -1).tolist(),  # q, k, v and out of head 0, then of head 1, …
        "missing": heads.missing,
        "shared": heads.attention.heads // heads.attention.key_heads,
    }
