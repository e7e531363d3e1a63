"""Compaction: convert a trained network to a small program, without dead nodes and with constant nodes folded in."""

from wirings.compaction.compact import compact
from wirings.compaction.compact_model import CompactModel, load_compact
from wirings.compaction.compare import check_outputs
from wirings.compaction.export import check_export_path
from wirings.compaction.program import Program
from wirings.compaction.report import CompactionReport, ProgramSize
from wirings.compaction.semi_structured import SemiStructuredLayer, semi_structured_

__all__ = [
    "CompactModel",
    "CompactionReport",
    "Program",
    "ProgramSize",
    "SemiStructuredLayer",
    "check_export_path",
    "check_outputs",
    "compact",
    "load_compact",
    "semi_structured_",
]
