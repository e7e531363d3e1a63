"""How much memory compiling a network takes, and what to say if there is less.

Maps are written as soon as they are allocated, and the system kills a process that writes more than there is. So what
is needed is estimated first.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Iterator, Mapping, Sequence

from wirings.compaction.operations import Conv
from wirings.compaction.program import Program
from wirings.errors import WiringError
from wirings.utils.memory import available_memory, is_out_of_memory

BLOCK = 16
"""PyTorch copies the maps of many convolutions into blocks of this many channels, full or not."""


class NotEnoughMemoryError(WiringError):
    """A network does not fit into memory for images of this size."""


def not_enough(wanted: int, threads: int, left: int, whose: str) -> NotEnoughMemoryError:
    """The error for a network that needs more bytes than there are."""
    return NotEnoughMemoryError(
        f"images of this size need {wanted:,} bytes of memory on {threads} threads, but {whose} {left:,}. Use fewer "
        'threads, smaller images, or engine="torch".'
    )


def expect_available(wanted: int, threads: int) -> None:
    """Raise if so many bytes cannot be allocated now."""
    left = available_memory()
    if wanted > left:
        raise not_enough(wanted, threads, left, "only this many are available:")


def says_not_enough(error: Exception) -> bool:
    """Whether an error says that there is not enough memory."""
    return isinstance(error, NotEnoughMemoryError) or (not isinstance(error, WiringError) and is_out_of_memory(error))


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Turn errors of allocations into one that says what to do."""
    try:
        yield
    except Exception as error:
        if isinstance(error, WiringError) or not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold what was allocated
        raise NotEnoughMemoryError(
            "there is not enough memory to compile this network for images of this size. Use fewer threads, smaller "
            "images, or the model as it is."
        ) from error


def bytes_per_image(program: Program, shapes: Mapping[str, Sequence[int]]) -> int:
    """Bytes for running one image on the kernels and on PyTorch and comparing, without the memory of the kernels.

    Args:
        program: the network.
        shapes: the shapes of all of its tensors, without the batch dimension.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    copies = [
        sum(math.prod((-(-shapes[name][0] // BLOCK) * BLOCK, *shapes[name][1:])) for name in (o.inputs[0], o.output))
        for o in program.operations
        if isinstance(o, Conv)
    ]
    # A program keeps all tensors while it runs, and batches are joined from two parts.
    return 4 * (sum(sizes.values()) + 2 * sum(sizes[name] for name in program.outputs) + max(copies, default=0))


def images_that_fit(
    program: Program, shapes: Mapping[str, Sequence[int]], counts: Sequence[int], needed: int = 0
) -> int:
    """The first of some batch sizes with which a network can be compared with PyTorch; 0 if none fits into memory.

    Args:
        program: the network.
        shapes: the shapes of all of its tensors, without the batch dimension.
        counts: the batch sizes. A program that works for one batch size only has that one.
        needed: bytes that will be allocated besides.
    """
    each, left = bytes_per_image(program, shapes), available_memory() - needed
    fixed = program.notes.get("batch")
    return next((count for count in counts if each * (fixed or count) <= left), 0)
