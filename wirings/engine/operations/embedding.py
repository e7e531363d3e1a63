"""Embeddings of tokens; their kernel is in ``source/embedding.h``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wirings.compaction.operations import Embedding
from wirings.engine.bounds import expect_all_inside, expect_inside
from wirings.engine.lowering import Lowering, as_array
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.operations.registry import kernel_for
from wirings.engine.step import Fields, LoweredStep, StepContext, integers, pointers


@dataclass(eq=False)
class EmbeddingStep(LoweredStep):
    """The rows of a table for the caller's tokens."""

    kind = "embedding"
    layout = (*pointers("table", "out"), *integers("channels", "tokens", "source", "tiles"))
    out: FeatureMaps
    table: np.ndarray
    """(rows, channels)."""
    source: int
    """The number of the caller's input with the tokens."""
    tokens: int

    def reads(self) -> list[FeatureMaps]:
        return []

    def fields(self, context: StepContext) -> tuple[Fields, int]:
        out = context.memory.offsets(self.out)
        expect_inside(self.name, out, context.extent(self.out), context.floats)
        expect_all_inside(self.name, self.tokens, context.input_sizes[self.source])
        tiles = max(1, min(self.tokens, 2 * context.threads))
        values = {
            "table": self.table,
            "out": out,
            "channels": len(out),
            "tokens": self.tokens,
            "source": self.source,
            "tiles": tiles,
        }
        return values, tiles


@kernel_for(Embedding, lambda o, shapes: len(shapes[0]) == 1)
def lower_embedding(lowering: Lowering, o: Embedding) -> FeatureMaps:
    out = lowering.new_like(o.output)
    number, tokens = lowering.input_number(o.inputs[0]), lowering.shapes[o.inputs[0]][0]
    lowering.emit(EmbeddingStep(o.output, out, as_array(o.weight), number, tokens))
    return out
