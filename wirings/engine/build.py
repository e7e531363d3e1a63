"""Load the compiled kernels, which are built when they are first needed.

They are an optional part. Where there is no compiler, or it fails, a warning says so once, and networks run on PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import warnings
from ctypes import POINTER, c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path

from wirings.engine.kernel_step import KernelStep
from wirings.engine.step import KINDS
from wirings.utils.cache import cache_folder
from wirings.utils.compiler import MissingError, Source

SOURCE = Source("engine", Path(__file__).parent / "source", "engine.cpp")
SWITCH = "WIRINGS_ENGINE"
"""An environment variable; "torch" disables the compiled kernels."""
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)  # a thread that held it does not exist there


def kernels() -> ctypes.CDLL | None:
    """The compiled kernels, or None if they are not available, which a warning explains once."""
    with _lock:
        return _kernels(os.environ.get(SWITCH, ""), os.environ.get("CXX", ""), str(cache_folder()))


@functools.cache
def _kernels(switch: str, compiler: str, folder: str) -> ctypes.CDLL | None:
    if switch == "torch":
        return None
    try:
        return SOURCE.load(compiler, Path(folder), _declared)
    except (MissingError, OSError) as error:
        warnings.warn(
            f"wirings.engine: no compiled kernels on this machine, so networks run on PyTorch. {error}",
            stacklevel=4,
        )
        return None


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of the library's functions; raises if the layout of a step differs from Python's."""
    library.wirings_tile.argtypes = [c_int]
    library.wirings_step_bytes.restype = c_int64
    library.wirings_kernel_name.argtypes, library.wirings_kernel_name.restype = [c_int], c_char_p
    library.wirings_kernel_bytes.argtypes, library.wirings_kernel_bytes.restype = [c_int], c_int64
    library.wirings_scratch.argtypes, library.wirings_scratch.restype = [POINTER(KernelStep)], c_int64
    library.wirings_memory.argtypes, library.wirings_memory.restype = [c_int64], POINTER(c_float)
    library.wirings_free.argtypes, library.wirings_free.restype = [POINTER(c_float)], None
    library.wirings_pool.argtypes, library.wirings_pool.restype = [c_int], c_void_p
    library.wirings_free_pool.argtypes, library.wirings_free_pool.restype = [c_void_p], None
    library.wirings_run.argtypes = [c_void_p, c_void_p, c_int64, c_void_p]
    library.wirings_run.restype = c_int
    compiled = {name: library.wirings_kernel_bytes(number) for name, number in kernel_kinds(library).items()}
    declared = {name: ctypes.sizeof(kind.struct) for name, kind in KINDS.items()}
    different = sorted(name for name, _ in compiled.items() ^ declared.items())
    if different or library.wirings_step_bytes() != ctypes.sizeof(KernelStep):
        names = ", ".join(dict.fromkeys(different)) or "all"
        raise MissingError(f"The compiler lays steps out differently from ctypes: {names}.")
    return library


def kernel_kinds(library: ctypes.CDLL) -> dict[str, int]:
    """The kinds of steps that the kernels compute, by name: their numbers in the table of kernels."""
    return {library.wirings_kernel_name(number).decode(): number for number in range(library.wirings_kernel_count())}
