"""A callback for the Hugging Face Trainer (`pip install transformers accelerate`)."""

from __future__ import annotations

from typing import Any

from wirings.errors import WiringError
from wirings.train.integrations.handle import check_handle, figures, finalize, key_of, plan
from wirings.wire.handle import Wiring

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise WiringError(
        f"this callback is for the Hugging Face Trainer, which cannot be imported ({error}): pip install transformers "
        "accelerate."
    ) from error


class WiringCallback(TrainerCallback):  # type: ignore[misc]
    """Lets a wired model train under the ``Trainer``.

        wiring = wirings.wire_(model, "dnw", density=0.1)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[WiringCallback(wiring)])

    Args:
        wiring: the handle of the model, or of a part of it.
        log: whether edges and edges swapped are added to the logs of training.
        finalize: whether `wirings.finalize_` gives plain modules back when ``train`` has come to its end. Checkpoints
            that were saved by then are of the wired model, with the plain one's names and all its weights: a plain
            model that loads one is dense. Save the finalized model for use (``trainer.save_model``).
        name: tells it from other WiringCallbacks of the same trainer, in checkpoints; by default the name of the first
            layer that the handle wires.
    """

    def __init__(self, wiring: Wiring, *, log: bool = True, finalize: bool = True, name: str | None = None) -> None:
        check_handle(wiring)
        self.wiring, self.log, self.finalize = wiring, log, finalize
        self._key = key_of(wiring, name)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        check_handle(self.wiring, model)
        plan(self.wiring, state.max_steps)
        if state.global_step:  # it goes on from a checkpoint
            saved = (state.stateful_callbacks or {}).get(self._key)
            if saved is None:
                raise WiringError(
                    f"the checkpoint of step {state.global_step} was saved without WiringCallback, so it does not say "
                    "where the wiring stood; begin anew, or go on from one that was saved with it."
                )
            self.wiring.load_state_dict(saved)

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **more: Any) -> None:
        self.wiring.step(optimizer)
        state.stateful_callbacks[self._key] = self.wiring.state_dict()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if self.log and logs is not None and "loss" in logs:  # not an evaluation's, nor the summary at the end
            told = figures(self.wiring)
            logs.update(told)
            state.log_history[-1].update(told)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.finalize:
            finalize(self.wiring)
