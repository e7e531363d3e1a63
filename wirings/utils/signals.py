"""SIGTERM and Ctrl-C: work that can be saved is saved first, and a second Ctrl-C ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

REPEATED = 0.5
"""Seconds within which a second SIGINT is the same key press: torchrun passes on to its processes what they got too."""
WORKER_GRACE = 30
"""Seconds after SIGTERM in which a worker of a loader goes on, so that the run which it serves can save its state."""

_stopped_by: list[int] = []
"""The signals that raised `KeyboardInterrupt`, in order."""


def stop_status() -> int:
    """What a process returns that a `KeyboardInterrupt` ended: 143 if SIGTERM raised it, 130 for Ctrl-C."""
    return 128 + (_stopped_by[-1] if _stopped_by else signal.SIGINT)


class StopSignals:
    """While it is entered, SIGTERM and SIGINT raise `KeyboardInterrupt`, or within `deferred` only ask to stop.

    Within `deferred`, whoever works looks at ``received`` when it can stop. A second SIGINT raises in any case; other
    further signals are ignored. Outside of the main thread, where Python cannot handle signals, it does nothing.

    Args:
        announcement: written to the standard error when the first signal is deferred.

    Attributes:
        received: the number of the first signal, or None.
    """

    def __init__(self, announcement: str = "") -> None:
        self.announcement = announcement
        self.received: int | None = None
        self._when = 0.0
        self._deferred = False
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """The name of the signal, such as SIGTERM."""
        return "" if self.received is None else signal.Signals(self.received).name

    @property
    def exit_status(self) -> int:
        """What a process that the signal ends returns: 143 for SIGTERM, 130 for SIGINT, which is also the default."""
        return 128 + (self.received or signal.SIGINT)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A block that saves its work: signals do not interrupt it, except for a second SIGINT."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked process has copied the handlers
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        now = time.monotonic()
        if self.received is not None:
            if number == signal.SIGINT and now - self._when > REPEATED:
                _stopped_by.append(number)
                raise KeyboardInterrupt
            return
        self.received, self._when = number, now
        if not self._deferred:
            _stopped_by.append(number)
            raise KeyboardInterrupt
        if self.announcement:
            os.write(2, f"\n{self.announcement}\n".encode())  # print could be interrupted in itself


def outlast_signals(_worker: int = 0) -> None:
    """In a worker of a loader, ignore Ctrl-C and delay SIGTERM, which schedulers send to all processes of a run.

    Otherwise the loss of its workers would end the run before it has saved its state.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(WORKER_GRACE) and None)
