"""The memory of this machine, and errors that say that none could be allocated."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_TEXTS = (
    "can't allocate memory",
    "not enough memory",
    "CUDA out of memory",
    "failed to map segment",
    "bad_alloc",
    "can't start new thread",
    "could not create a primitive",  # oneDNN's
)
_LITTLE = 2**28
"""With fewer bytes left than this, Python's own failures come from a lack of memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, PyTorch or the loader of libraries says that memory could not be allocated."""
    if isinstance(error, SystemError):  # functions in C that fail without saying why
        return available_memory() < _LITTLE
    return isinstance(error, MemoryError) or any(text in str(error) for text in _TEXTS)


_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Where Linux shows the limits of containers, and in which ones this process is."""
_MACHINE, _OWN_SIZE = Path("/proc/meminfo"), Path("/proc/self/statm")
"""Where Linux shows how much memory is free, and how much this process has."""


def installed_memory() -> int:
    """Bytes of memory of this machine, or of the container that this process is in, if it may use less.

    The system kills a process that uses more, instead of refusing the allocation.
    """
    try:
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not available on every system
        installed = 2**63
    return min([installed, *_container_limits().values()])


def available_memory() -> int:
    """Bytes that this process can allocate now: what the machine, its containers and its own limits leave."""
    left = [installed_memory()]
    with suppress(OSError, ValueError, IndexError):  # not Linux
        lines = _MACHINE.read_text(encoding="utf-8").splitlines()
        left += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    for place, limit in _container_limits().items():
        with suppress(OSError, ValueError):
            left.append(limit - _container_usage(place.parent))
    with suppress(ImportError, OSError, ValueError):  # not available on every system
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            pages = int(_OWN_SIZE.read_text(encoding="utf-8").split()[0])
            left.append(soft - pages * resource.getpagesize())
    return max(0, min(left))


def _container_usage(folder: Path) -> int:
    """Bytes that the processes of a control group use, without files that the system would drop from its cache."""
    for used, cached in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
        with suppress(OSError):
            total = int((folder / used).read_text(encoding="utf-8"))
            lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
            return total - sum(int(line.split()[1]) for line in lines if line.startswith(f"{cached} "))
    return 0


def _container_limits() -> dict[Path, int]:
    """The limits on this process's memory: those of its control groups, in version 1 and 2, and of those above them."""
    places = {
        _CGROUPS / "memory.max",
        _CGROUPS / "memory" / "memory.limit_in_bytes",
    }  # what a container sees as its own
    with suppress(OSError, ValueError):
        for line in _OWN_CGROUPS.read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for depth in range(1, len(parts) + 1):
                inner = "/".join(parts[:depth])
                if number == "0":
                    places.add(_CGROUPS / inner / "memory.max")
                elif "memory" in controllers.split(","):
                    places.add(_CGROUPS / "memory" / inner / "memory.limit_in_bytes")
    found = {}
    for place in places:
        with suppress(OSError, ValueError):  # there is none, or it says "max"
            found[place] = int(place.read_text(encoding="utf-8"))
    return {place: limit for place, limit in found.items() if limit > 0}
