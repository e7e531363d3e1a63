"""Histories of wirings: recorded while a model trains, stored in one small file, and replayed."""

from wirings.history.record import Recorder
from wirings.history.replay import History, WiringState
from wirings.history.snapshot import snapshot_of

__all__ = ["History", "Recorder", "WiringState", "snapshot_of"]
