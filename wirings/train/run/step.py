"""One training step: forward, loss, backward, optimizer.

A step never waits for the device. The loss, the accuracy and the first step with a loss that is not finite are
accumulated on the device and read at the end of an epoch.
"""

from __future__ import annotations

import copy
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from wirings.train.settings import Settings
from wirings.wire.handle import Wiring

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Autocast for a precision of the settings. Casts are not cached, since a captured step could not keep them."""
    half = PRECISIONS.get(precision, torch.bfloat16)
    return torch.autocast(device.type, half, enabled=precision in PRECISIONS, cache_enabled=False)


class TrainingStep:
    """Makes training steps.

    Args:
        model: the model to train.
        wiring: its handle, or None if nothing is wired.
        optimizer: from `wirings.train.run.optimizer.make_optimizer`.
        settings: the run's settings.
        device: the device of the model.
        world: the number of processes.
        padded: whether some labels are -100, which do not count.

    Attributes:
        used: what is called for the forward pass: the model, or that compiled or in DDP.
        average: the running average of the model, or None (see the setting ``ema``).
        totals: the summed loss, correct predictions and labels since the last `read`.
        count: the number of steps made.
        bad: the first step whose loss was not finite, or -1.
    """

    def __init__(
        self,
        model: nn.Module,
        wiring: Wiring | None,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        device: torch.device,
        world: int = 1,
        padded: bool = False,
    ) -> None:
        self.model, self.used, self.wiring, self.optimizer, self.settings = model, model, wiring, optimizer, settings
        self.device, self.world, self.padded = device, world, padded
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")
        self.totals = torch.zeros(3, dtype=torch.float64, device=device)
        self.count, self.bad = torch.zeros((), dtype=torch.int64, device=device), torch.full((), -1, device=device)
        self.average = copy.deepcopy(model) if settings.ema is not None else None
        self._lr = settings.optimizer.lr

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of the forward pass."""
        return autocast(self.settings.precision, self.device)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate; writes to the device only if it changes."""
        if lr != self._lr:
            self._lr = lr
            for group in self.optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr

    def __call__(self, x: Tensor, y: Tensor, examples: int) -> None:
        """Make a step.

        Args:
            x: the examples of this process: images, (batch, channels, height, width), or tokens, (batch, context).
            y: their labels, (batch,), or those of each token, (batch, context); -100 for none.
            examples: the size of the batch over all processes.
        """
        settings = self.settings
        if settings.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        self.optimizer.zero_grad()
        share = self._share_of_label(y, examples)
        parts = list(zip(x.chunk(settings.accumulate), y.chunk(settings.accumulate), strict=True))
        for i, (part, of_part) in enumerate(parts, 1):
            with self._no_sync() if i < len(parts) else nullcontext():
                with self.autocast():
                    scores, labels = self.used(part).flatten(0, -2), of_part.flatten()
                    loss = nn.functional.cross_entropy(
                        scores, labels, label_smoothing=settings.label_smoothing, reduction="sum"
                    )
                self.scaler.scale(loss * share).backward()
            self._accumulate(loss.detach(), scores.detach(), labels)
        if settings.clip is not None:
            self.scaler.unscale_(self.optimizer)
            if self.wiring is not None:
                self.wiring.clip_grad_norm_(settings.clip)
            else:
                nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.count += 1
        if self.average is not None:
            self._update_average(1 - settings.ema)  # type: ignore[operator]

    def _share_of_label(self, y: Tensor, examples: int) -> float | Tensor:
        """The factor of the summed loss. DDP averages gradients over processes: so it is the mean over all labels."""
        if not self.padded:
            return self.world / (examples * math.prod(y.shape[1:]))
        count = (y >= 0).sum()  # stays on the device, where a captured step computes it again for each batch
        if self.world > 1:
            dist.all_reduce(count)
        return self.world / count

    def _no_sync(self) -> AbstractContextManager[Any]:
        """Without DDP's synchronisation: processes may have different numbers of parts, so only the last one syncs."""
        if isinstance(self.used, nn.parallel.DistributedDataParallel):
            return self.used.no_sync()
        return nullcontext()

    def _accumulate(self, loss: Tensor, scores: Tensor, labels: Tensor) -> None:
        right = (scores.argmax(1) == labels).sum()
        count = (labels >= 0).sum()  # padding is labelled -100, which the loss ignores
        self.totals += torch.stack([loss.double(), right.double(), count.double()])
        self.bad.copy_(torch.where((self.bad < 0) & ~torch.isfinite(loss), self.count, self.bad))

    @torch.no_grad()
    def _update_average(self, share: float) -> None:
        assert self.average is not None
        torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), share)
        for mean, now in zip(self.average.buffers(), self.model.buffers(), strict=True):
            mean.copy_(now)

    def read(self) -> tuple[float, float, int]:
        """The mean loss, the accuracy in percent and the number of labels since the last call."""
        loss, right, examples = self.totals.tolist()
        self.totals.zero_()
        return loss / max(examples, 1), 100 * right / max(examples, 1), int(examples)


def acts_between_steps(wiring: Wiring | None) -> bool:
    """Whether ``wiring.step`` does anything: for rules that change the wiring, and for budgets with a schedule."""
    return wiring is not None and wiring.acts_between_steps
