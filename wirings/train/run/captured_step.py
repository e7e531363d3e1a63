"""A whole training step captured in a CUDA graph, so that the host launches one graph instead of many kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.train.run.step import PRECISIONS, TrainingStep


class CapturableLoader(Protocol):
    """A loader whose batches can be fetched inside a CUDA graph."""

    def begin(self, number: int, start: int = 0) -> None: ...
    def next(self, size: int) -> tuple[Tensor, Tensor]: ...
    def sizes(self) -> list[int]: ...


class CapturedStep:
    """A `TrainingStep` and the fetching of its batch in a CUDA graph, one graph for each batch size.

    If the gradient reaches hallucinated edges in some steps only (``gradient_every``), there is one for either kind.
    """

    def __init__(self, step: TrainingStep, loader: CapturableLoader) -> None:
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self.wiring = step.wiring
        sizes = loader.sizes()
        kinds = [(size, to_all) for size in sorted(set(sizes), reverse=True) for to_all in self._kinds()]
        now = self._to_all
        loader.begin(0)
        fetch = _compiled(loader.next, sizes[0])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # warm up
            for size, to_all in kinds:
                self._set(to_all)
                for _ in range(3):
                    loader.begin(0)
                    step(*fetch(size), size)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        pool = None
        for size, to_all in kinds:
            self._set(to_all)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                step(*fetch(size), size)
            pool = graph.pool()
            self.graphs[size, to_all] = graph
        self._set(now)

    def __call__(self, size: int) -> None:
        """Fetch the next batch, of ``size`` examples, and make a step on it."""
        self.graphs[size, self._to_all].replay()

    @property
    def _to_all(self) -> bool:
        return self.wiring is None or self.wiring.gradient_to_all

    def _set(self, to_all: bool) -> None:
        if self.wiring is not None:
            self.wiring.gradient_to_all = to_all

    def _kinds(self) -> tuple[bool, ...]:
        return (True,) if self.wiring is None or self.wiring.gradient_every == 1 else (True, False)


def _compiled(fetch: Callable[[int], tuple[Tensor, Tensor]], size: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """``fetch`` as a single kernel, or as it is if it cannot be compiled."""
    faster: Callable[[int], tuple[Tensor, Tensor]] = torch.compile(fetch, dynamic=False)
    try:
        faster(size)
    except Exception:
        return fetch
    return faster


def capture(step: TrainingStep, loader: Any, say: Callable[[str], None]) -> CapturedStep | None:
    """Capture a whole step, compiled unless the model has its own kernels. Training has not begun: the step is reset.

    Args:
        step: the step to capture.
        loader: the training data.
        say: called with the reason if the step cannot be captured.

    Returns:
        The captured step, or None if it cannot be captured.
    """
    reason = None
    if step.device.type != "cuda":
        reason = "there is no CUDA device"
    elif step.world > 1:
        reason = "training runs on several processes"
    elif not hasattr(loader, "begin"):
        reason = "the data is not on the device"
    if reason is None:
        state = {name: value.clone() for name, value in step.model.state_dict().items()}
        scaler = step.scaler.state_dict()
        try:
            if not _runs_in_own_kernels(step):
                # Compiled for each batch size: code for all sizes is slower, and would be used for every size.
                step.used = torch.compile(step.model, dynamic=False)  # type: ignore[assignment]
            return CapturedStep(step, loader)
        except WiringError:
            raise
        except Exception as error:
            step.used = step.model
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        finally:  # the steps of the warm-up do not count
            reset(step, state, scaler)
    say(f"fast: the step cannot be captured ({reason}). Training runs without capturing; results are the same.")
    return None


def _runs_in_own_kernels(step: TrainingStep) -> bool:
    """Whether a model says that in the precision of the step it runs in kernels that a compiled one cannot use."""
    ask = getattr(step.model, "runs_in_own_kernels", None)
    return ask is not None and ask(PRECISIONS.get(step.settings.precision, torch.float32))


@torch.no_grad()
def reset(step: TrainingStep, state: dict[str, Tensor], scaler: dict[str, Any]) -> None:
    """Reset a step in place, as if it had made none.

    Args:
        step: the step; a captured one keeps working, since tensors keep their memory.
        state: the ``state_dict`` that its model gets.
        scaler: the ``state_dict`` that its gradient scaler gets.
    """
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
