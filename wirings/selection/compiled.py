"""Choosing edges on a CPU with a compiled kernel, which makes the same choice as NumPy, several times faster.

Training never waits for a compiler. A library that is in the cache is loaded when edges of a large weight are first
chosen. Otherwise NumPy chooses them, and once a process has spent about as long on that as compiling takes, the kernel
is compiled in the background. Without a compiler, or if it fails, NumPy goes on.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from ctypes import POINTER, c_int64, c_uint64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from wirings.utils.cache import cache_folder
from wirings.utils.compiler import MissingError, Source

SWITCH = "WIRINGS_SELECTION"
"""An environment variable; "numpy" disables the compiled kernel."""
SOURCE = Source("selection", Path(__file__).parent / "source", "select.cpp")
LEAST = 2**13
"""Weights of fewer edges are no reason to load the library, or to compile it: NumPy takes 0.1 ms."""
PATIENCE = 2**28
"""The number of edges among which NumPy chooses before the kernel is compiled; takes a second, as compiling does."""
_FAILURES = (MissingError, OSError, RuntimeError, ValueError)  # the last two: no home folder, and CXX with open quotes
_imported_by = os.getpid()


class SelectCall(ctypes.Structure):
    """What the kernel is asked for: ``SelectCall`` in ``select.cpp``."""

    _fields_ = [
        ("weight", c_void_p), ("allowed", c_void_p), ("n", c_int64), ("k", c_int64), ("bytes", c_int64),
        ("dimensions", c_int64), ("sizes", POINTER(c_int64)), ("strides", POINTER(c_int64)),
        ("parallel", c_void_p), ("threads", c_int64),
        ("mask", c_void_p), ("kept", c_void_p), ("places", c_void_p), ("values", c_void_p),
        ("next_magnitude", c_uint64),
    ]  # fmt: skip


class CompiledKernel:
    """The library, once it is there."""

    def __init__(self) -> None:
        self.library: ctypes.CDLL | None = None
        self._settled = False  # it is loaded, or will never be
        self._cached: bool | None = None  # whether it was in the cache; None until somebody has looked
        self._selected = 0  # the edges among which NumPy has chosen so far
        self._builder: threading.Thread | None = None
        self._lock = threading.Lock()

    def get(self, edges: int) -> ctypes.CDLL | None:
        """The library, or None if NumPy has to choose among so many edges."""
        if self._settled or edges < LEAST:
            return self.library
        if self._lock.acquire(blocking=False):  # else another thread is here; a forked process may never get it
            try:
                self._advance(edges)
            finally:
                self._lock.release()
        return self.library

    def _advance(self, edges: int) -> None:
        if self._cached is None:
            self._cached = False
            if os.environ.get(SWITCH) == "numpy":
                self._settled = True
                return
            try:
                self.library = SOURCE.load_built(cache_folder(), _declared)
                self._cached = self._settled = True
            except _FAILURES:
                pass
        elif self._builder is None:
            self._selected += edges
            if self._selected >= PATIENCE:
                self.build_in_background()

    def build_in_background(self) -> None:
        """Start compiling. Not in a daemon thread: a program that ends meanwhile would leave half a library behind."""
        self._builder = threading.Thread(target=self.build, name="wirings-compile")
        try:
            self._builder.start()
        except RuntimeError:  # the system provides no more threads
            self._settled = True

    def build(self) -> None:
        """Compile the library unless it is in the cache, and load it. Without a compiler nothing happens."""
        try:
            self.library = SOURCE.load(os.environ.get("CXX", ""), cache_folder(), _declared)
        except _FAILURES:
            pass
        finally:
            self._settled = True


kernel = CompiledKernel()


def select(
    weight: Tensor,
    k: int,
    allowed: Tensor | None,
    mask: Tensor | None = None,
    kept: Tensor | None = None,
    places: Tensor | None = None,
    values: Tensor | None = None,
) -> tuple[int, int] | None:
    """Write results for the ``k`` edges of largest magnitude, or return None if the kernel cannot.

    Args:
        weight: the weight, in any dense memory format.
        k: the number of edges.
        allowed: the edges to choose among, or None for all.
        mask: filled with the boolean mask. In the memory format of ``weight``, like the next.
        kept: filled with the chosen weights, zeros elsewhere.
        places: ``k`` int64, filled with the places in memory of the chosen weights, in ascending order.
        values: filled with the chosen weights, in the same order. Required by ``places``.

    Returns:
        The number of edges chosen, which is less than ``k`` if fewer are allowed, and nothing is written then; and the
        bits of the magnitude of the strongest edge that is not chosen, 0 if all allowed ones are.
    """
    n = weight.numel()
    library = kernel.get(n)
    if library is None or not 0 < k < n:
        return None
    order = memory_order(weight)
    if order is None:
        return None
    if allowed is not None and allowed.stride() != weight.stride():
        allowed = torch.empty_like(weight, dtype=torch.bool).copy_(allowed)
    call = SelectCall(weight=weight.data_ptr(), n=n, k=k, bytes=weight.element_size())
    call.allowed = None if allowed is None else allowed.data_ptr()
    if order:
        rows = [1] * (weight.dim() + 1)  # the strides of row-major order
        for d in range(weight.dim() - 1, -1, -1):
            rows[d] = rows[d + 1] * weight.shape[d]
        array = c_int64 * len(order)
        call.dimensions = len(order)
        call.sizes, call.strides = array(*(weight.shape[d] for d in order)), array(*(rows[d + 1] for d in order))
    call.parallel = _parallel()
    # OpenMP's threads do not survive a fork.
    call.threads = torch.get_num_threads() if os.getpid() == _imported_by else 1
    call.mask, call.kept, call.places, call.values = (
        None if tensor is None else tensor.data_ptr() for tensor in (mask, kept, places, values)
    )
    chosen = library.wirings_select(ctypes.byref(call))
    return None if chosen < 0 else (chosen, call.next_magnitude)


def memory_order(weight: Tensor) -> list[int] | None:
    """The dimensions in the order of memory, [] if that is row-major; None if the weight does not fill its memory."""
    if weight.is_contiguous():
        return []
    order = sorted(range(weight.dim()), key=weight.stride, reverse=True)
    return order if weight.permute(order).is_contiguous() else None


@functools.cache
def _parallel() -> int | None:
    """The address of the function with which PyTorch's OpenMP starts threads; None if there is none."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.wirings_select.argtypes, library.wirings_select.restype = [POINTER(SelectCall)], c_int64
    library.wirings_select_call_bytes.restype = c_int64
    if library.wirings_select_call_bytes() != ctypes.sizeof(SelectCall):
        raise MissingError("The compiler lays calls out differently from ctypes.")
    return library
