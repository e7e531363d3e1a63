"""Recording a history while a model trains, at little cost.

A record is taken on the device: which edges are real and how strong, a byte each. From a GPU it is copied to the host
while the next steps run, and nobody waits for it; a thread of its own finds what has changed since the record before,
and compresses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.history import file_format
from wirings.history.from_model import kernel_weights, places_of, structure_of
from wirings.history.quantize import encode
from wirings.history.replay import History

if TYPE_CHECKING:
    from wirings.wire.handle import Wiring

Number = float | int | Tensor


class Recorder:
    """Records the history of a wiring. Call `step` after every optimizer step; `save` it, or give it a file to add to.

    Args:
        wiring: the handle of the wiring.
        every: steps from one record to the next. What happens in between is not seen.
        path: a file that the records go to at every `flush`; None: they are kept in memory alone.
        about: what the file is to say of itself; whatever JSON can hold.
        resume: a history to go on from; what it has of later steps than ``step`` is left out.
        step: where training stands. A history that begins has its first record here.
    """

    def __init__(
        self,
        wiring: Wiring,
        every: int = 100,
        *,
        path: str | Path | None = None,
        about: Mapping[str, Any] | None = None,
        resume: History | None = None,
        step: int = 0,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise WiringError(
                f"history: every is a number of steps from one record to the next, at least 1, not {every!r}."
            )
        self.wiring, self.every, self.steps = wiring, every, step
        self.path = None if path is None else Path(path)
        structure = structure_of(places_of(self.wiring))
        self._kernels = kernel_weights(places_of(self.wiring))
        self._codes = np.zeros(structure.places, np.int8)
        self._worker: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._written = self._size = 0
        if resume is not None and resume.structure.to_json() == structure.to_json():
            self._history = resume.until(step)
            if len(self._history):
                last = self._history.state()
                places, codes, _ = last._all
                self._codes[places] = codes
        else:
            self._history = History(structure, {"rule": wiring.rule.name, **(about or {})})
        if self.path is not None:
            self._history.save(self.path)
            self._written, self._size = len(self._history.chunks), self.path.stat().st_size
        if not self._history.steps:
            self.record()

    def step(self, number: int | None = None, **values: Number) -> None:
        """A step of the optimizer is done: number ``number``, or one more than the last. Records if one is due.

        Args:
            number: the step's number, from 1, for those who count themselves.
            values: numbers to be noted if a record is due, such as ``loss=loss``; tensors are not waited for.
        """
        self.steps = self.steps + 1 if number is None else number
        if self.steps % self.every == 0:
            self.record(**values)

    @torch.no_grad()
    def record(self, **values: Number) -> None:
        """Record the wiring as it is now."""
        places = places_of(self.wiring)
        parts = [encode(p.weight, real).reshape(-1) for p, real in zip(places, self.wiring._real(), strict=True)]
        if self._kernels:
            kernels = torch.cat([kernel.reshape(-1).to(parts[0].device) for kernel in self._kernels])
            parts.append(encode(kernels, None))
        noted = {name: v.detach().reshape(()) if isinstance(v, Tensor) else v for name, v in values.items()}
        if not parts[0].is_cuda:  # nobody to wait for, and a thread would cost more than it saves
            self._add(self.steps, np.concatenate([part.cpu().numpy() for part in parts]), noted)
            return
        codes = torch.cat([part.to(parts[0].device) for part in parts])
        copies = {name: _copied(v) if isinstance(v, Tensor) and v.is_cuda else v for name, v in noted.items()}
        on_host, event = _copied(codes), torch.cuda.Event(blocking=True)  # the worker sleeps until then
        event.record()
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "history")
        self._pending.append(self._worker.submit(self._wait_and_add, self.steps, on_host, copies, event))

    def _wait_and_add(self, step: int, codes: Tensor, values: Mapping[str, Number], copied: torch.cuda.Event) -> None:
        """In the worker: once the codes are here."""
        copied.synchronize()
        self._add(step, codes.numpy().copy(), values)  # the pinned memory is needed for the next ones

    def _add(self, step: int, codes: np.ndarray, values: Mapping[str, Number]) -> None:
        """What has changed since the record before."""
        self._history.add(file_format.difference(step, self._codes, codes))
        self._codes = codes
        self._add_note(step, {name: float(value) for name, value in values.items()})

    def _add_note(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value for name, value in values.items() if np.isfinite(value)}
        if finite:
            self._history.add(file_format.pack_json(file_format.NOTE, [step, finite]))

    def note(self, **values: float) -> None:
        """Numbers that belong to this step, such as the accuracy after an epoch."""
        self._settle()
        self._add_note(self.steps, values)

    def _settle(self) -> None:
        for pending in self._pending:
            pending.result()
        self._pending.clear()

    def history(self) -> History:
        """What was recorded up to now."""
        self._settle()
        return self._history

    def flush(self) -> None:
        """Add to the file what it does not have yet."""
        self._settle()
        if self.path is None:
            return
        new = self._history.chunks[self._written :]
        try:
            with self.path.open("r+b") as file:
                file.seek(self._size)  # what a full disk left of an earlier try is written over
                file.write(b"".join(chunk.framed() for chunk in new))
                file.truncate()
                size = file.tell()
        except FileNotFoundError:  # somebody removed it
            size = self._history.save(self.path).stat().st_size
        except OSError as error:
            raise WiringError(
                f"the history could not be written to {self.path}: {error.strerror}. Make room."
            ) from error
        self._written, self._size = self._written + len(new), size

    def save(self, path: str | Path) -> Path:
        """Write all of it to a file, whole or not at all."""
        return self.history().save(path)

    def close(self) -> None:
        """Write the rest and end the worker."""
        self.flush()
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None


def _copied(tensor: Tensor) -> Tensor:
    """A copy on the host, which is on its way: nobody waits for it here."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
