"""Histories of wirings: recorded while a model trains, kept in one small file, replayed."""

from wirings.history.record import Recorder
from wirings.history.replay import History, State
from wirings.history.snapshot import still

__all__ = ["History", "Recorder", "State", "still"]
