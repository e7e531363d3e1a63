"""Several processes, one a device, started by torchrun; a single one needs nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from wirings.errors import WiringError
from wirings.utils.locks import held


@dataclass(frozen=True)
class Place:
    """Which process this is, of how many, and its device."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def most(self, value: Tensor) -> Tensor:
        """The largest over all processes."""
        if self.world > 1:
            dist.all_reduce(value, dist.ReduceOp.MAX)
        return value

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    def same_everywhere(self, flag: bool) -> bool:
        """The first process's answer, on all of them."""
        if self.world == 1:
            return flag
        answer = torch.tensor(int(flag), device=self.device)
        dist.broadcast(answer, 0)
        return bool(answer.item())


@contextmanager
def together(place: Place, what_to_do: str) -> Iterator[None]:
    """Says so if another process has gone: this one cannot do without it."""
    try:
        yield
    except WiringError:
        raise
    except RuntimeError as error:
        signs = ("gloo", "nccl", "peer", "process group")
        if place.world == 1 or not any(sign in str(error).lower() for sign in signs):
            raise
        raise WiringError(
            f"process {place.rank} of {place.world} ends, because another one has ended; see its own message. "
            f"{what_to_do} ({str(error).splitlines()[0]})"
        ) from error


@contextmanager
def alone(place: Place, folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keep a run's folder for these processes: the first one locks it, and all of them end if it cannot."""
    with ExitStack() as stack:
        failed: WiringError | None = None
        if place.first:
            try:
                stack.enter_context(held(folder, say))
            except WiringError as error:
                failed = error
        if not place.same_everywhere(failed is None):
            leave()
            raise failed or WiringError(
                f"process {place.rank} of {place.world} ends: the first one cannot use {folder}."
            )
        yield


def kind_of(device: str | None) -> str | None:
    """``"cuda"``, ``"cpu"``, or None for whatever there is; raises for anything else."""
    kind = None if device is None else str(device).partition(":")[0]
    if kind not in (None, "cuda", "cpu"):
        raise WiringError(f"device must be cuda or cpu, not {device!r}; left out, it is a GPU where there is one.")
    return kind


def start(device: str | None = None) -> Place:
    """Take part in what torchrun started, or be alone."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    kind = kind_of(device)
    on_gpu = torch.cuda.is_available() if kind is None else kind == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise WiringError("device cuda was asked for, but PyTorch finds no CUDA device here; leave --device out.")
    if on_gpu:
        local = int(os.environ.get("LOCAL_RANK", torch.device(device or "cuda").index or 0))
        place = torch.device("cuda", local)
        torch.cuda.set_device(place)
    else:
        place = torch.device("cpu")
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return Place(rank, world, place)


def leave() -> None:
    """Leave what `start` took part in, as the last thing that a process does.

    Gloo's threads let go of their tensors a moment after a collective has ended, and need Python for it: where Python
    has ended before, they abort the process. NCCL warns where nobody leaves.
    """
    if dist.is_initialized():
        time.sleep(0.5)
        dist.destroy_process_group()
