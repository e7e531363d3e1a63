"""Build the compiled kernels when they are first needed, cache them, and load them with ctypes.

They are an optional part. Where there is no compiler, or it fails, a warning says so once, and networks run on PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import threading
import warnings
from ctypes import POINTER, c_double, c_float, c_int, c_int64, c_void_p
from pathlib import Path

from wirings.engine.kernel_step import KernelStep
from wirings.utils.cache import cache_folder
from wirings.utils.files import whole_file

SOURCE = Path(__file__).parent / "source"
SWITCH = "WIRINGS_ENGINE"
"""An environment variable; "torch" disables the compiled kernels."""
# No -ffast-math: NaN and infinity have to behave as in PyTorch. Contraction enables fused multiply-adds.
FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread",
)  # fmt: skip
SECONDS = 300
_lock = threading.Lock()


class MissingError(Exception):
    """The kernels are not available; the message says why."""


def kernels() -> ctypes.CDLL | None:
    """The compiled kernels, or None if they are not available, which a warning explains once."""
    with _lock:
        return _kernels(os.environ.get(SWITCH, ""), os.environ.get("CXX", ""), str(cache_folder()))


@functools.cache
def _kernels(switch: str, compiler: str, folder: str) -> ctypes.CDLL | None:
    if switch == "torch":
        return None
    try:
        found = _compilers(compiler)
        library = _built(found, Path(folder)) if found else _built_before(Path(folder))
        return _declared(_opened(library))
    except (MissingError, OSError) as error:
        warnings.warn(
            f"wirings.engine: no compiled kernels on this machine, so networks run on PyTorch. {error}",
            stacklevel=4,
        )
        return None


def _opened(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise MissingError(
            f"{error}. Remove {library} to have it built again, or set WIRINGS_CACHE to a folder from which libraries "
            "can be loaded."
        ) from error


def _compilers(named: str) -> list[list[str]]:
    """Compilers to try, in order: the one that the user names, or those on the PATH."""
    if named:
        return [shlex.split(named)]
    return [[path] for name in ("c++", "g++", "clang++") if (path := shutil.which(name))]


def _built_before(folder: Path) -> Path:
    """The newest library in the cache, for machines without a compiler."""
    found = list((folder / "engine").glob(f"kernels-{_own_key()}-*.so"))
    if not found:
        raise MissingError("There is no C++ compiler: install g++ or clang++, or name one in CXX.")
    return max(found, key=lambda library: library.stat().st_mtime)


def _built(compilers: list[list[str]], folder: Path) -> Path:
    """The path of the library, which is built unless it is in the cache."""
    failures, own = [], _own_key()
    for compiler in compilers:
        try:
            library = folder / "engine" / f"kernels-{own}-{_key(compiler)}.so"
        except MissingError as missing:  # it does not print its version
            failures.append(str(missing))
            continue
        if library.is_file():
            return library
        try:
            with whole_file(library) as part:
                _compile(compiler, part)
        except MissingError as missing:
            failures.append(str(missing))
        except OSError as error:
            raise MissingError(
                f"{library} could not be written: {error}. Set WIRINGS_CACHE to another folder."
            ) from error
        else:
            return library
    raise MissingError(" ".join(failures))


def _compile(compiler: list[str], library: Path) -> None:
    problem = ""
    for machine in (["-march=native"], ["-mcpu=native"], []):  # not every compiler supports each of these
        command = [*compiler, *FLAGS, *machine, str(SOURCE / "engine.cpp"), "-o", str(library)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MissingError(f"The compiler {' '.join(compiler)} could not be run: {error}.") from error
        if done.returncode == 0 and library.is_file():
            return
        problem = (done.stderr or done.stdout).strip().splitlines()[0] if (done.stderr or done.stdout).strip() else ""
    raise MissingError(f"The compiler {' '.join(compiler)} failed: {problem or 'it did not say why'}.")


def _own_key() -> str:
    """A key for everything a library depends on besides the compiler: the source, the flags and the processor."""
    parts = [path.read_bytes() for path in sorted(SOURCE.iterdir())]
    return _digest([*parts, " ".join(FLAGS).encode(), processor().encode()])


def _key(compiler: list[str]) -> str:
    """A key for the compiler and its version."""
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=False, timeout=SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingError(f"The compiler {' '.join(compiler)} could not be run: {error}.") from error
    return _digest([version, " ".join(compiler).encode()])


def _digest(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


def processor() -> str:
    """The processor and its features, so that machines that share a cache have separate libraries."""
    about = Path("/proc/cpuinfo")
    if about.is_file():
        wanted = ("model name", "flags", "Features", "CPU part")
        lines = {line for line in about.read_text().splitlines() if line.startswith(wanted)}
        return "\n".join(sorted(lines))
    return f"{platform.machine()} {platform.processor()}"


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of the library's functions; raises if the layout of a step differs from Python's."""
    pointers = POINTER(c_void_p)
    library.wirings_tile.argtypes = [c_int]
    library.wirings_step_bytes.restype = c_int64
    library.wirings_scratch.argtypes, library.wirings_scratch.restype = [POINTER(KernelStep)], c_int64
    library.wirings_memory.argtypes, library.wirings_memory.restype = [c_int64], POINTER(c_float)
    library.wirings_free.argtypes, library.wirings_free.restype = [POINTER(c_float)], None
    library.wirings_pool.argtypes, library.wirings_pool.restype = [c_int], c_void_p
    sizes = POINTER(c_int64)
    library.wirings_run.argtypes = [
        c_void_p, POINTER(KernelStep), c_int, pointers, pointers,
        pointers, sizes, c_int, pointers, sizes, c_int, c_int64, c_int, POINTER(c_double),
    ]  # fmt: skip
    library.wirings_run.restype = c_int
    if library.wirings_step_bytes() != ctypes.sizeof(KernelStep):
        raise MissingError("The compiler lays steps out differently from ctypes.")
    return library
