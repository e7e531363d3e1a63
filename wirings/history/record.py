"""Recording a history while a model trains, at little cost.

A record is computed on the model's device: which edges are real and how strong they are, one byte each. On a GPU it is
copied to the host while the next steps run, so training never waits for it, and a worker thread computes and compresses
the difference from the previous record.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.history import file_format
from wirings.history.from_model import kernel_weights, structure_of_wiring, wired_weights_of
from wirings.history.quantize import encode
from wirings.history.replay import History
from wirings.utils.checks import is_int
from wirings.utils.files import check_file
from wirings.wire import fsdp
from wirings.wire.handle import Wiring

Number = float | int | Tensor


class Recorder:
    """Records which edges of a model are real, and how strong they are, while it trains.

    Call `step` after every optimizer step, and at the end `save`, or pass ``path`` and call `close`::

        wiring = wirings.wire_(model, "dnw", density=0.1)
        recorder = wirings.Recorder(wiring, every=100, path="model.wirings")
        for x, y in loader:
            ...
            optimizer.step()
            wiring.step()
            recorder.step(loss=loss)
        recorder.close()  # `wirings show model.wirings --html` plays it

    Args:
        wiring: the handle returned by `wirings.wire_`.
        every: optimizer steps between two records. Changes in between are not seen.
        path: a file to append records to at every `flush`. By default records stay in memory until `save`.
        about: metadata to store in the file; any JSON value.
        resume: a history to continue. Its records after ``step`` are dropped. If it belongs to another model, a new
            history begins.
        step: the number of optimizer steps done so far. A new history has its first record here.

    Raises:
        WiringError: an argument is invalid, or the model is sharded over several processes.
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
        _check_wiring(wiring)
        if not is_int(every) or every < 1:
            raise WiringError(f"Recorder: every must be a number of steps, at least 1, got {every!r}.")
        self.wiring, self.every, self.steps = wiring, every, step
        self.path = None if path is None else check_file(path)
        structure = structure_of_wiring(wiring)
        self._kernels = kernel_weights(wired_weights_of(wiring))
        self._codes = np.zeros(structure.size, np.int8)
        self._worker: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._written = self._size = 0
        if resume is not None and resume.structure.same_edges(structure):
            self._history = History(structure, resume.about, resume.until(step).chunks)
            if len(self._history):
                self._codes = self._history.state().all_codes()
        else:
            self._history = History(structure, {"rule": wiring.rule.name, **(about or {})})
        if self.path is not None:
            self._history.save(self.path)
            self._written, self._size = len(self._history.chunks), self.path.stat().st_size
        if not self._history.steps:
            self.record()

    def step(self, number: int | None = None, **values: Number) -> None:
        """Count an optimizer step, and record the wiring if a record is due.

        Args:
            number: the number of the step, from 1; by default, one more than the last.
            values: values to store with the record if one is due, such as ``loss=loss``. Tensors on a GPU are read
                asynchronously; values that are not finite are dropped.
        """
        self.steps = self.steps + 1 if number is None else number
        if self.steps % self.every == 0:
            self.record(**values)

    @torch.no_grad()
    def record(self, **values: Number) -> None:
        """Record the current wiring. ``values`` are stored with the record, as in `step`."""
        weights, masks = wired_weights_of(self.wiring), self.wiring.masks()
        parts = [encode(one.weight, masks[one.name]).reshape(-1) for one in weights]
        if self._kernels:
            kernels = torch.cat([kernel.reshape(-1).to(parts[0].device) for kernel in self._kernels])
            parts.append(encode(kernels, None))
        noted = {name: v.detach().reshape(()) if isinstance(v, Tensor) else v for name, v in values.items()}
        if not parts[0].is_cuda:  # nothing to wait for, and a thread would cost more than it saves
            self._add(self.steps, np.concatenate([part.cpu().numpy() for part in parts]), noted)
            return
        codes = torch.cat([part.to(parts[0].device) for part in parts])
        copies = {name: _copy_to_host(v) if isinstance(v, Tensor) and v.is_cuda else v for name, v in noted.items()}
        on_host, event = _copy_to_host(codes), torch.cuda.Event(blocking=True)  # the worker sleeps until it is done
        event.record()
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "history")
        self._pending.append(self._worker.submit(self._wait_and_add, self.steps, on_host, copies, event))

    def _wait_and_add(self, step: int, codes: Tensor, values: Mapping[str, Number], copied: torch.cuda.Event) -> None:
        """Add a record once its copy is complete; runs in the worker."""
        copied.synchronize()
        self._add(step, codes.numpy().copy(), values)  # frees the pinned memory for the next record

    def _add(self, step: int, codes: np.ndarray, values: Mapping[str, Number]) -> None:
        self._history.add(file_format.pack_record(step, self._codes, codes))
        self._codes = codes
        self._add_note(step, {name: float(value) for name, value in values.items()})

    def _add_note(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value for name, value in values.items() if np.isfinite(value)}
        if finite:
            self._history.add(file_format.pack_json(file_format.NOTE, [step, finite]))

    def note(self, **values: float) -> None:
        """Store values that belong to the current step, such as the accuracy after an epoch."""
        self._settle()
        self._add_note(self.steps, values)

    def _settle(self) -> None:
        """Wait until all records are in the history."""
        for pending in self._pending:
            pending.result()
        self._pending.clear()

    def history(self) -> History:
        """Everything recorded so far."""
        self._settle()
        return self._history

    def flush(self) -> None:
        """Append the records to the file at ``path`` that are not in it yet."""
        self._settle()
        if self.path is None:
            return
        new = self._history.chunks[self._written :]
        try:
            with self.path.open("r+b") as file:
                file.seek(self._size)  # overwrite what an earlier attempt left behind when the disk was full
                file.write(b"".join(chunk.framed() for chunk in new))
                file.truncate()
                size = file.tell()
        except FileNotFoundError:  # the file was removed
            size = self._history.save(self.path).stat().st_size
        except OSError as error:
            raise WiringError(
                f"cannot write the history to {self.path}: {error.strerror}. Free some disk space."
            ) from error
        self._written, self._size = self._written + len(new), size

    def save(self, path: str | Path) -> Path:
        """Write the whole history to a file, atomically."""
        return self.history().save(path)

    def close(self) -> None:
        """Flush, and stop the worker thread."""
        self.flush()
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None


def _check_wiring(wiring: object) -> None:
    """Raise unless a wiring can be recorded in this process."""
    if not isinstance(wiring, Wiring):
        raise WiringError(
            f"Recorder expects the handle returned by wirings.wire_(model, …), got {type(wiring).__name__}."
        )
    if any(fsdp.manages(layer.module) for layer in wiring.layers):
        raise WiringError(
            "a history can only be recorded in one process, but this model is sharded over several. Train it without "
            "fully_shard, or store wiring.masks(full=True) yourself."
        )


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Start an asynchronous copy to pinned host memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
