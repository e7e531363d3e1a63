"""Processes that the tests start."""

import time

from torch import distributed as dist


def leave() -> None:
    """Leave the process group as the last thing that a process does.

    Gloo's threads let go of their tensors a moment after a collective has ended, and need Python for it: where Python
    has ended before, they abort the process.
    """
    time.sleep(0.5)
    dist.destroy_process_group()
