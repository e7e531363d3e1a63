"""One training step: forward, loss, backward, optimizer, rule; called, or captured whole in a CUDA graph.

Nothing in a step waits for the device. What a log wants to know (loss, accuracy, the first step that went wrong) is
added up there and read when asked for.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from wirings.budgets.budget import matches
from wirings.errors import WiringError
from wirings.train.settings import Settings
from wirings.wire.handle import Wiring

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Fetching(Protocol):
    """A loader whose batches can be taken inside a CUDA graph."""

    def begin(self, number: int, start: int = 0) -> None: ...
    def next(self, size: int) -> tuple[Tensor, Tensor]: ...
    def sizes(self) -> list[int]: ...


def make_optimizer(
    model: nn.Module, wiring: Wiring | None, settings: Settings, device: torch.device
) -> torch.optim.SGD:
    """SGD, with a weight decay of their own for edges, for norms and biases, and for what patterns name."""
    chosen = settings.optimizer
    without = _matching(model, chosen.no_decay)
    edges = {id(layer.weight) for layer in wiring.layers} if wiring is not None else set()
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        decay = chosen.weight_decay
        if id(parameter) in without:
            decay = 0.0
        elif id(parameter) in edges:
            decay = decay if chosen.weight_decay_edges is None else chosen.weight_decay_edges
        elif parameter.dim() <= 1 and not chosen.weight_decay_norms:
            decay = 0.0
        groups.setdefault(decay, []).append(parameter)
    on_gpu = device.type == "cuda"
    return torch.optim.SGD(
        [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()],
        # A tensor, so that a captured step sees it change.
        lr=torch.tensor(chosen.lr, device=device) if on_gpu else chosen.lr,
        momentum=chosen.momentum,
        nesterov=chosen.nesterov,
        fused=on_gpu,
    )


def _matching(model: nn.Module, patterns: Sequence[str]) -> set[int]:
    """The parameters that a pattern matches, by `id`; every pattern must match one."""
    named = {plain_name(name): id(p) for name, p in model.named_parameters()}
    for pattern in patterns:
        if not any(matches(name, pattern) for name in named):
            raise WiringError(
                f"optimizer.no_decay: {pattern!r} matches no parameter of the model. Its parameters: "
                f"{', '.join(list(named)[:12])}{', …' if len(named) > 12 else ''}."
            )
    return {which for name, which in named.items() if any(matches(name, pattern) for pattern in patterns)}


def plain_name(name: str) -> str:
    """The name that a parameter has while nothing is wired.

    >>> plain_name("head.parametrizations.weight.original"), plain_name("head.bias")
    ('head.weight', 'head.bias')
    """
    return re.sub(r"(^|\.)parametrizations\.([^.]+)\.original$", r"\1\2", name)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The precision of the settings; without a cache of casts, which a captured step could not keep."""
    half = PRECISIONS.get(precision, torch.bfloat16)
    return torch.autocast(device.type, half, enabled=precision in PRECISIONS, cache_enabled=False)


class Step:
    """Makes steps. ``totals`` adds up loss, correct predictions and examples; ``bad`` is the first step gone bad."""

    def __init__(
        self,
        model: nn.Module,
        wiring: Wiring | None,
        optimizer: torch.optim.SGD,
        settings: Settings,
        device: torch.device,
        world: int = 1,
    ) -> None:
        self.model, self.used, self.wiring, self.optimizer, self.settings = model, model, wiring, optimizer, settings
        self.device, self.world = device, world
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")
        self.totals = torch.zeros(3, dtype=torch.float64, device=device)
        self.count, self.bad = torch.zeros((), dtype=torch.int64, device=device), torch.full((), -1, device=device)
        self.average = copy.deepcopy(model) if settings.ema is not None else None
        self._lr = settings.optimizer.lr

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.settings.precision, self.device)

    def set_lr(self, lr: float) -> None:
        """Writes nothing where nothing changes."""
        if lr != self._lr:
            self._lr = lr
            for group in self.optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr

    def __call__(self, x: Tensor, y: Tensor, examples: int) -> None:
        """A step on a batch, which has ``examples`` examples over all ranks."""
        settings = self.settings
        if settings.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        self.optimizer.zero_grad()
        parts = list(zip(x.chunk(settings.accumulate), y.chunk(settings.accumulate), strict=True))
        for i, (part, labels) in enumerate(parts, 1):
            with self._alone() if i < len(parts) else nullcontext():
                with self.autocast():
                    scores = self.used(part)
                    loss = nn.functional.cross_entropy(
                        scores, labels, label_smoothing=settings.label_smoothing, reduction="sum"
                    )
                # Over all ranks, whose gradients are averaged, this is the mean over all examples of the batch.
                self.scaler.scale(loss * (self.world / examples)).backward()
            self._add(loss.detach(), scores.detach(), labels)
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
            self._average(1 - settings.ema)  # type: ignore[operator]

    def _alone(self) -> AbstractContextManager[Any]:
        """Without the other ranks, who may have another number of parts: gradients meet in the last one."""
        if isinstance(self.used, nn.parallel.DistributedDataParallel):
            return self.used.no_sync()
        return nullcontext()

    def _add(self, loss: Tensor, scores: Tensor, labels: Tensor) -> None:
        right = (scores.argmax(1) == labels).sum()
        self.totals += torch.stack([loss.double(), right.double(), torch.full_like(right, len(labels)).double()])
        self.bad.copy_(torch.where((self.bad < 0) & ~torch.isfinite(loss), self.count, self.bad))

    @torch.no_grad()
    def _average(self, share: float) -> None:
        assert self.average is not None
        torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), share)
        for mean, now in zip(self.average.buffers(), self.model.buffers(), strict=True):
            mean.copy_(now)

    def read(self) -> tuple[float, float, int]:
        """Mean loss, accuracy in percent and examples since the last reading."""
        loss, right, examples = self.totals.tolist()
        self.totals.zero_()
        return loss / max(examples, 1), 100 * right / max(examples, 1), int(examples)


class Captured:
    """A `Step` captured in a CUDA graph together with the fetching of its batch, once for each size of a batch."""

    def __init__(self, step: Step, loader: Fetching) -> None:
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        sizes = loader.sizes()
        loader.begin(0)
        fetch = compiled(loader.next, sizes[0])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # warm up
            for size in sorted(set(sizes), reverse=True):
                for _ in range(3):
                    loader.begin(0)
                    step(*fetch(size), size)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        pool = None
        for size in sorted(set(sizes), reverse=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                step(*fetch(size), size)
            pool = graph.pool()
            self.graphs[size] = graph

    def __call__(self, size: int) -> None:
        self.graphs[size].replay()


def compiled(fetch: Callable[[int], tuple[Tensor, Tensor]], size: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Fetching a batch as one kernel, where the compiler takes it."""
    faster: Callable[[int], tuple[Tensor, Tensor]] = torch.compile(fetch, dynamic=False)
    try:
        faster(size)
    except Exception:
        return fetch
    return faster


@torch.no_grad()
def forget(step: Step, state: dict[str, Tensor], scaler: dict[str, Any]) -> None:
    """Make a step new, in place, as if it had made none: with this state of its model and of its scaler."""
    step.model.load_state_dict(state)
    for held in step.optimizer.state.values():
        for value in held.values():
            if isinstance(value, Tensor):
                value.zero_()
    if step.average is not None:
        step.average.load_state_dict(state)
    step.totals.zero_()
    step.count.zero_()
    step.bad.fill_(-1)
    step.scaler.load_state_dict(scaler)


def make_fast(step: Step, loader: Any, say: Callable[[str], None]) -> Captured | None:
    """Compile and capture the whole step; where that cannot be done, say why and return None."""
    reason = None
    if step.device.type != "cuda":
        reason = "there is no CUDA device"
    elif step.world > 1:
        reason = "several processes share the work"
    elif not hasattr(loader, "begin"):
        reason = "the data does not live on the device"
    if reason is None:
        state = {name: value.clone() for name, value in step.model.state_dict().items()}
        scaler = step.scaler.state_dict()
        try:
            # Code for each size of a batch: what is made for any size is slower, and would be taken for all of them.
            step.used = torch.compile(step.model, dynamic=False)  # type: ignore[assignment]
            return Captured(step, loader)
        except WiringError:
            raise
        except Exception as error:
            step.used = step.model
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        finally:  # warming up was no training
            forget(step, state, scaler)
    say(f"fast: the step cannot be captured ({reason}); it runs as it is, with the same results.")
    return None


def acts_between_steps(wiring: Wiring | None) -> bool:
    """Whether the handle has anything to do after a step: a schedule, or a rule that acts."""
    return wiring is not None and wiring.acts_between_steps
