"""A callback for Lightning (`pip install lightning`)."""

from __future__ import annotations

from typing import Any

from wirings.errors import WiringError
from wirings.train.integrations.handle import (
    Finalized,
    check_handle,
    check_sparse,
    figures,
    finalize,
    holding,
    key_of,
    plan,
)
from wirings.wire.handle import Wiring

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise WiringError(
            f"this callback is for Lightning, which cannot be imported ({error}): pip install lightning."
        ) from error


class WiringCallback(Callback):  # type: ignore[misc]
    """Lets a wired module train under Lightning's ``Trainer``, with any number of batches an optimizer step.

        wiring = wirings.wire_(module.model, "dnw", density=0.1)
        trainer = lightning.Trainer(callbacks=[WiringCallback(wiring)])

    Args:
        wiring: the handle of the module, or of a part of it.
        log: whether edges and edges swapped are logged, once an epoch.
        finalize: whether `wirings.finalize_` gives plain modules back when ``fit`` has come to its end. Checkpoints
            that Lightning has saved by then are of the wired module, with the plain one's names and all its weights:
            to test one (``ckpt_path="best"``), give ``finalize=False`` and call `wirings.finalize_` afterwards.
        name: tells it from other WiringCallbacks of the same trainer, in checkpoints; by default the name of the first
            layer that the handle wires.
    """

    def __init__(self, wiring: Wiring, *, log: bool = True, finalize: bool = True, name: str | None = None) -> None:
        check_handle(wiring)
        self.wiring, self.log, self.finalize = wiring, log, finalize
        self._steps, self._key = 0, key_of(wiring, name)
        self._finalized: list[Finalized] = []

    @property
    def state_key(self) -> str:
        return self._key

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        check_handle(self.wiring, pl_module)
        self._steps = trainer.global_step
        plan(self.wiring, trainer.estimated_stepping_batches)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step > self._steps:  # several batches may make one step
            self._steps = trainer.global_step
            self.wiring.step(holding(self.wiring, trainer.optimizers))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.log:
            pl_module.log_dict(figures(self.wiring))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self.finalize:
            self._finalized = finalize(self.wiring)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        check_sparse(self._finalized)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        check_sparse(self._finalized)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        check_sparse(self._finalized)

    def state_dict(self) -> dict[str, Any]:
        return self.wiring.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wiring.load_state_dict(state_dict)
