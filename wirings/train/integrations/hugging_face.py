"""A callback for the Hugging Face Trainer (``pip install "wirings[integrations]"``, or transformers and accelerate)."""

from __future__ import annotations

from typing import Any

from wirings.errors import WiringError
from wirings.train.integrations.common import check_handle, checkpoint_key, finalize, metrics, plan_steps
from wirings.wire.adapter_guard import guard_adapters
from wirings.wire.handle import Wiring
from wirings.wire.pretrained import intercept_saving

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise WiringError(
        f"cannot import the Hugging Face Trainer ({error}). Install it with: pip install transformers accelerate"
    ) from error


class WiringTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """Trains a wired model with the Hugging Face ``Trainer``.

        wiring = wirings.wire_(model, "dnw", density=0.1)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[WiringTrainerCallback(wiring)])

    Args:
        wiring: the handle of the model, or of a part of it.
        log: whether to add the number of edges, the density and the swapped edges to the training logs.
        finalize: whether to call `wirings.finalize_` when ``train`` ends. ``from_pretrained`` loads the network in use
            from a checkpoint of a Hugging Face model, and `wirings.rewire_` wires it again as it was. Checkpoints of
            other modules hold all weights under the names of the plain module, which is dense if it loads one.
        name: distinguishes several callbacks of one trainer in checkpoints; by default, the name of the first layer
            that the handle wires.
    """

    def __init__(self, wiring: Wiring, *, log: bool = True, finalize: bool = True, name: str | None = None) -> None:
        check_handle(wiring)
        self.wiring, self.log, self.finalize = wiring, log, finalize
        self._key = checkpoint_key(wiring, name)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        check_handle(self.wiring, model)
        intercept_saving()  # the model may have been wired before transformers was imported,
        guard_adapters()  # or PEFT
        plan_steps(self.wiring, state.max_steps)
        if state.global_step:  # training resumes from a checkpoint
            saved = (state.stateful_callbacks or {}).get(self._key)
            if saved is None:
                raise WiringError(
                    f"the checkpoint of step {state.global_step} was saved without WiringTrainerCallback and lacks the "
                    "state of the wiring. Resume from a checkpoint that was saved with it, or start again."
                )
            self.wiring.load_state_dict(saved)

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **more: Any) -> None:
        self.wiring.step(optimizer)
        state.stateful_callbacks[self._key] = self.wiring.state_dict()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if self.log and logs is not None and "loss" in logs:  # not for evaluations or the final summary
            values = metrics(self.wiring)
            logs.update(values)
            state.log_history[-1].update(values)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.finalize:
            finalize(self.wiring)
