"""Compaction: a trained network as a small program, without what is dead and with what is constant folded in."""
