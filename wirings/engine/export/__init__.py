"""Compiled networks as C++ source code, for programs without Python."""

from wirings.engine.export.export_network import TARGETS, export_network

__all__ = ["TARGETS", "export_network"]
