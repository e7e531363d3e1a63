"""Compile C++ sources of the package with the system's compiler, cache the libraries, and load them with ctypes.

Compiled code is always optional: `MissingError` says why there is none, and the caller does without.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from wirings.utils import locks
from wirings.utils.files import whole_file

# No -ffast-math: NaN and infinity have to behave as in PyTorch. Contraction enables fused multiply-adds.
FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread",
)  # fmt: skip
SECONDS = 300.0
"""How long a compiler may take."""


class MissingError(Exception):
    """A library is not available; the message says why."""


@dataclass(frozen=True)
class Source:
    """C++ code that becomes one library.

    Args:
        name: of its folder in the cache.
        folder: its files.
        main: the file to compile, which includes the others.
    """

    name: str
    folder: Path
    main: str

    def load(self, compiler: str, cache: Path) -> ctypes.CDLL:
        """Load the library, which is compiled unless it is in the cache; raises `MissingError`.

        Args:
            compiler: the command of the only compiler to use; if empty, those on the PATH are tried.
            cache: the folder of the cache.
        """
        found = compilers(compiler)
        return opened(self.built(found, cache) if found else self.built_before(cache))

    def built_before(self, cache: Path) -> Path:
        """The newest library in the cache, from whatever compiler; raises `MissingError`."""
        found = list((cache / self.name).glob(f"kernels-{self.key()}-*.so"))
        if not found:
            raise MissingError("There is no C++ compiler: install g++ or clang++, or name one in CXX.")
        return max(found, key=lambda library: library.stat().st_mtime)

    def built(self, compilers: Sequence[list[str]], cache: Path) -> Path:
        """The library by the first compiler that works: from the cache, or compiled now; raises `MissingError`."""
        failures, own = [], self.key()
        for compiler in compilers:
            try:
                library = cache / self.name / f"kernels-{own}-{compiler_key(compiler)}.so"
            except MissingError as missing:  # it does not print its version
                failures.append(str(missing))
                continue
            if library.is_file():
                return library
            try:
                with _alone_in(library.parent):
                    if not library.is_file():  # another process may have compiled it in the meantime
                        with whole_file(library) as part:
                            self.compile(compiler, part)
            except MissingError as missing:
                failures.append(str(missing))
            except OSError as error:
                raise MissingError(
                    f"{library} could not be written: {error}. Set WIRINGS_CACHE to another folder."
                ) from error
            else:
                return library
        raise MissingError(" ".join(failures))

    def compile(self, compiler: list[str], library: Path) -> None:
        """Compile the library; raises `MissingError`."""
        problem = ""
        for machine in (["-march=native"], ["-mcpu=native"], []):  # not every compiler supports each of these
            command = [*compiler, *FLAGS, *machine, str(self.folder / self.main), "-o", str(library)]
            done = _run(compiler, command)
            if done.returncode == 0 and library.is_file():
                return
            said = (done.stderr or done.stdout).decode(errors="replace").strip()
            problem = said.splitlines()[0] if said else ""
        raise MissingError(f"The compiler {' '.join(compiler)} failed: {problem or 'it did not say why'}.")

    def key(self) -> str:
        """A key for everything a library depends on besides the compiler: the source, the flags and the processor."""
        parts = [path.read_bytes() for path in sorted(self.folder.iterdir())]
        return _digest([*parts, " ".join(FLAGS).encode(), processor().encode()])


def opened(library: Path) -> ctypes.CDLL:
    """Open a library; raises `MissingError`."""
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise MissingError(
            f"{error}. Remove {library} to have it built again, or set WIRINGS_CACHE to a folder from which libraries "
            "can be loaded."
        ) from error


def compilers(named: str) -> list[list[str]]:
    """Compilers to try, in order: the one that the user names, or those on the PATH."""
    if named:
        return [shlex.split(named)]
    return [[path] for name in ("c++", "g++", "clang++") if (path := shutil.which(name))]


def compiler_key(compiler: list[str]) -> str:
    """A key for the compiler and its version; raises `MissingError`."""
    return _digest([_run(compiler, [*compiler, "--version"]).stdout, " ".join(compiler).encode()])


def processor() -> str:
    """The processor and its features, so that machines that share a cache have separate libraries."""
    about = Path("/proc/cpuinfo")
    if about.is_file():
        wanted = ("model name", "flags", "Features", "CPU part")
        lines = {line for line in about.read_text().splitlines() if line.startswith(wanted)}
        return "\n".join(sorted(lines))
    return f"{platform.machine()} {platform.processor()}"


def _run(compiler: list[str], command: list[str]) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingError(f"The compiler {' '.join(compiler)} could not be run: {error}.") from error


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process compiles into a folder.

    That saves time: several processes of one training need the same library. Libraries are written atomically, so where
    the other one takes too long, or there are no locks, both compile.
    """
    lock, end = None, time.monotonic() + SECONDS
    while lock is None and time.monotonic() < end:
        try:
            lock = locks.take(folder)
        except locks.BusyError:
            time.sleep(0.1)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _digest(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]
