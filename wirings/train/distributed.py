"""Training on several processes, one for each device, started by torchrun; one process needs no setup."""

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
from wirings.utils.locks import INSTEAD, held


@dataclass(frozen=True)
class ProcessContext:
    """The rank of this process, the number of processes, and the device of this one."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which alone writes files."""
        return self.rank == 0

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """Take the maximum of a tensor over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def any_flag(self, flag: bool) -> bool:
        """Whether the flag of any process is set."""
        if self.world == 1:
            return flag
        return bool(self.all_reduce_max(torch.tensor(int(flag), device=self.device)).item())

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world > 1:
            dist.barrier()

    def broadcast_flag(self, flag: bool) -> bool:
        """The flag of rank 0, on every process."""
        if self.world == 1:
            return flag
        answer = torch.tensor(int(flag), device=self.device)
        dist.broadcast(answer, 0)
        return bool(answer.item())


@contextmanager
def explain_lost_process(context: ProcessContext, advice: str) -> Iterator[None]:
    """Turn the errors of collectives that follow when another process has ended into one that says so.

    Args:
        context: this process.
        advice: what the user can do, a sentence for the message.
    """
    try:
        yield
    except WiringError:
        raise
    except RuntimeError as error:
        signs = ("gloo", "nccl", "peer", "process group")
        if context.world == 1 or not any(sign in str(error).lower() for sign in signs):
            raise
        raise WiringError(
            f"process {context.rank} of {context.world} stops because another process ended; see that one's message. "
            f"{advice} ({str(error).splitlines()[0]})"
        ) from error


@contextmanager
def lock_folder(
    context: ProcessContext, folder: Path, say: Callable[[str], None], instead: str = INSTEAD
) -> Iterator[None]:
    """Lock a run's folder for this group of processes. Rank 0 takes the lock; if it cannot, all processes raise.

    The arguments after ``context`` are those of `wirings.utils.locks.held`.
    """
    with ExitStack() as stack:
        failed: WiringError | None = None
        if context.first:
            try:
                stack.enter_context(held(folder, say, instead))
            except WiringError as error:
                failed = error
        if not context.broadcast_flag(failed is None):
            leave()
            raise failed or WiringError(
                f"process {context.rank} of {context.world} stops because rank 0 cannot use {folder}."
            )
        yield


def device_type(device: str | None) -> str | None:
    """``"cuda"``, ``"cpu"``, or None if the device is not given; raises for any other device."""
    kind = None if device is None else str(device).partition(":")[0]
    if kind not in (None, "cuda", "cpu"):
        raise WiringError(f"device must be cuda or cpu, got {device!r}. By default, a GPU is used if there is one.")
    return kind


def start(device: str | None = None) -> ProcessContext:
    """Join the processes that torchrun started, or work alone.

    Args:
        device: such as ``"cuda"`` or ``"cpu"``; by default a GPU, if there is one.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    kind = device_type(device)
    on_gpu = torch.cuda.is_available() if kind is None else kind == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise WiringError("device is cuda, but PyTorch finds no CUDA device. Leave --device out to use the CPU.")
    if on_gpu:
        local = int(os.environ.get("LOCAL_RANK", torch.device(device or "cuda").index or 0))
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    else:
        chosen = torch.device("cpu")
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return ProcessContext(rank, world, chosen)


def leave() -> None:
    """Destroy the process group that `start` joined; call it last.

    Gloo's threads release their tensors shortly after a collective has finished and need the interpreter for it: if
    that has ended, they abort the process. NCCL warns if the group is not destroyed.
    """
    if dist.is_initialized():
        time.sleep(0.5)
        dist.destroy_process_group()
