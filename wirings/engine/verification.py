"""Compare a compiled network with PyTorch, on as many images as fit into memory."""

from __future__ import annotations

from collections.abc import Sequence

from wirings.compaction import check_outputs
from wirings.compaction.program import Program
from wirings.engine.memory_needs import bytes_per_image, images_that_fit, not_enough
from wirings.engine.quantization import Quantization
from wirings.engine.segments import ProgramSegment, run_segments
from wirings.utils.memory import available_memory

TOLERANCE = 1e-3
"""A larger difference from PyTorch's outputs, as a share of the largest output, cannot be explained by rounding."""
INT8_TOLERANCE = 0.1
"""The same for networks in int8, where a number that is rounded differently changes by a whole step."""


def verify(
    program: Program,
    shapes: dict[str, tuple[int, ...]],
    segments: Sequence[ProgramSegment],
    threads: int,
    quantization: Quantization | None,
) -> None:
    """Raise unless the kernels compute what PyTorch does, with one image per thread and with one on all threads.

    This finds bugs. The tolerance is wide, since sums in another order are rounded differently. If so many images do
    not fit into memory, the network will run images one after the other, and that is compared instead.
    """
    count = images_that_fit(program, shapes, [threads + 1], missing_bytes(segments))
    if not count:
        run_images_in_turn(segments)
        count = images_that_fit(program, shapes, [2, 1], missing_bytes(segments))
    if not count:
        wanted = bytes_per_image(program, shapes) + missing_bytes(segments)
        raise not_enough(wanted, threads, available_memory(), "only this many are available:")
    images = program.example(count)
    found = run_segments(program, segments, images, threads)
    reference, tolerance = program, TOLERANCE
    if quantization is not None:
        reference, tolerance = quantization.reference(program), INT8_TOLERANCE
    # What rounding to int8 may do shows in how far the reference is from the network itself.
    check_outputs(program, found, images, reference.run(*images), "the compiled network", tolerance)


def run_images_in_turn(segments: Sequence[ProgramSegment]) -> bool:
    """Do without the plans for many images, whose threads have maps of their own; returns if there were any."""
    several = [segment for segment in segments if segment.batch_plan is not None]
    for segment in several:
        segment.batch_plan = None
    return bool(several)


def missing_bytes(segments: Sequence[ProgramSegment]) -> int:
    """Bytes of maps that the kernels allocate with the first call."""
    plans = (plan for segment in segments for plan in (segment.plan, segment.batch_plan))
    return sum(plan.missing for plan in plans if plan is not None)
