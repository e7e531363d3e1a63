"""Launching Triton kernels with little work on the host. Importing this module does not import Triton."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor


class KernelLauncher:
    """Launches a fixed sequence of kernels, from the second time on without Triton's inspection of the arguments.

    That inspection costs the host several times as much as the launch. It selects the compiled kernel by types,
    constants and what may be assumed about numbers and addresses; all of these are part of ``signature``, so the
    kernels of the first run fit every later run with the same signature.

    Args:
        signature: what distinguishes the compiled kernels; its first entry is the device.
    """

    known: ClassVar[dict[tuple[Any, ...], dict[int, Any]]] = {}

    def __init__(self, signature: tuple[Any, ...]) -> None:
        self.kernels, self.turn = self.known.setdefault(signature, {}), 0
        self.stream = torch._C._cuda_getCurrentRawStream(signature[0].index) if self.kernels else 0

    def __call__(self, kernel: Any, grid: int, warps: int, *args: Any, stages: int | None = None) -> None:
        """Launch the next kernel of the sequence; ``stages`` is how many steps of a loop are loaded ahead."""
        compiled = self.kernels.get(self.turn)
        if compiled is not None:
            # Addresses in place of tensors: the launcher would have to query each tensor, and the driver about each.
            plain = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
            compiled.run(grid, 1, 1, self.stream, compiled.function, compiled.packed_metadata, None, None, None, *plain)
        else:
            options = {} if stages is None else {"num_stages": stages}
            compiled = kernel[(grid,)](*args, num_warps=warps, **options)
            if compiled is not None:  # it is None in Triton's interpreter
                self.kernels[self.turn] = compiled
        self.turn += 1


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make a tensor's device the current one; free of cost if it already is, as it almost always is."""
    if not tensor.is_cuda or torch.cuda.current_device() == tensor.device.index:
        return _nothing
    return torch.cuda.device_of(tensor)


_nothing = nullcontext()
