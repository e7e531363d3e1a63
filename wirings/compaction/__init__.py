"""Compaction: a trained network as a small program, without what is dead and with what is constant folded in."""

from wirings.compaction.compact import compact
from wirings.compaction.module import CompactModel
from wirings.compaction.program import Program

__all__ = ["CompactModel", "Program", "compact"]
