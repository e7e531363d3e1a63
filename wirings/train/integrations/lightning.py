"""A callback for Lightning (``pip install "wirings[integrations]"``, or lightning)."""

from __future__ import annotations

from typing import Any

from wirings.errors import WiringError
from wirings.train.integrations.common import (
    FinalizedLayer,
    check_handle,
    check_sparse,
    checkpoint_key,
    finalize,
    metrics,
    optimizer_of,
    plan_steps,
)
from wirings.wire.handle import Wiring

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise WiringError(f"cannot import Lightning ({error}). Install it with: pip install lightning") from error


class WiringCallback(Callback):  # type: ignore[misc]
    """Trains a wired module with Lightning's ``Trainer``. Gradient accumulation is supported.

        wiring = wirings.wire_(module.model, "dnw", density=0.1)
        trainer = lightning.Trainer(callbacks=[WiringCallback(wiring)])

    Args:
        wiring: the handle of the module, or of a part of it.
        log: whether to log the number of edges, the density and the swapped edges once per epoch.
        finalize: whether to call `wirings.finalize_` when ``fit`` ends. Checkpoints saved during training hold all
            weights under the names of the plain module. To test one of them (``ckpt_path="best"``), pass
            ``finalize=False`` and call `wirings.finalize_` afterwards.
        name: distinguishes several callbacks of one trainer in checkpoints; by default, the name of the first layer
            that the handle wires.
    """

    def __init__(self, wiring: Wiring, *, log: bool = True, finalize: bool = True, name: str | None = None) -> None:
        check_handle(wiring)
        self.wiring, self.log, self.finalize = wiring, log, finalize
        self._steps, self._key = 0, checkpoint_key(wiring, name)
        self._finalized: list[FinalizedLayer] = []

    @property
    def state_key(self) -> str:
        return self._key

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        check_handle(self.wiring, pl_module)
        self._steps = trainer.global_step
        plan_steps(self.wiring, trainer.estimated_stepping_batches)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step > self._steps:  # with accumulated gradients, not every batch is an optimizer step
            self._steps = trainer.global_step
            self.wiring.step(optimizer_of(self.wiring, trainer.optimizers))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.log:
            pl_module.log_dict(metrics(self.wiring))

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
