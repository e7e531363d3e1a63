"""Compile C++ sources of the package with the system's compiler, cache the libraries, and load them with ctypes.

Compiled code is always optional: `MissingError` says why there is none, and the caller does without.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from wirings.utils import locks
from wirings.utils.cache import default_cache_folder
from wirings.utils.trust import UntrustedError, check_trusted_folder, open_trusted

# No -ffast-math: NaN and infinity have to behave as in PyTorch. Contraction enables fused multiply-adds.
FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread",
)  # fmt: skip
SECONDS = 300.0
"""How long a compiler may take."""


class MissingError(Exception):
    """A library is not available; the message says why."""


class DamagedError(MissingError):
    """A library in the cache is damaged, or somebody else may have written it."""


Declare = Callable[[ctypes.CDLL], ctypes.CDLL]
_loads = itertools.count()


def identity(library: ctypes.CDLL) -> ctypes.CDLL:
    """Return a library as it is."""
    return library


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

    def load(self, compiler: str, cache: Path, declare: Declare = identity) -> ctypes.CDLL:
        """Load the library, which is compiled unless it is in the cache; raises `MissingError`.

        Libraries are code, so only those are loaded that nobody but the user and root can have written. If others may
        write to the cache, the user's default cache takes its place, and a warning says so.

        Args:
            compiler: the command of the only compiler to use; if empty, those on the PATH are tried.
            cache: the folder of the cache.
            declare: declares the types of the library's functions; an AttributeError means that one is missing.
        """
        found = compilers(compiler)
        if not found:
            return self.load_built(cache, declare)
        folder = self.own_folder(cache)
        for _ in range(3):
            library = self.built(found, folder)
            try:
                return opened(library, declare)
            except DamagedError as error:
                damaged = error
                with contextlib.suppress(OSError):
                    library.unlink()
        raise damaged

    def load_built(self, cache: Path, declare: Declare = identity) -> ctypes.CDLL:
        """Load the newest library in the cache, from whatever compiler; raises `MissingError`."""
        for library in self.built_before(self.own_folder(cache)):
            with contextlib.suppress(DamagedError):
                return opened(library, declare)
        raise MissingError("There is no C++ compiler: install g++ or clang++, or name one in CXX.")

    def built_before(self, folder: Path) -> list[Path]:
        """The libraries in a folder, from whatever compiler, newest first."""
        found = folder.glob(f"kernels-{self.key()}-*-*.so")
        return sorted(found, key=lambda library: library.stat().st_mtime, reverse=True)

    def own_folder(self, cache: Path) -> Path:
        """The folder for libraries in the cache, or in the user's default cache if others may write to the former."""
        folders, reasons = [cache], list[str]()
        with contextlib.suppress(RuntimeError):  # there is no home
            folders.append(default_cache_folder())
        for folder in folders:
            try:
                own = check_trusted_folder(folder / self.name)
            except UntrustedError as error:
                reasons.append(str(error))
                continue
            if reasons:
                warnings.warn(
                    f"wirings: compiled code is kept in {folder}, since {reasons[0]}. Set WIRINGS_CACHE to a folder in "
                    "which only you may write.",
                    stacklevel=6,
                )
            return own
        raise MissingError(f"{reasons[0]}. Set WIRINGS_CACHE to a folder in which only you may write.")

    def built(self, compilers: Sequence[list[str]], folder: Path) -> Path:
        """The library by the first compiler that works: from a folder, or compiled now; raises `MissingError`."""
        failures, own = [], self.key()
        for compiler in compilers:
            try:
                stem = f"kernels-{own}-{compiler_key(compiler)}"
            except MissingError as missing:  # it does not print its version
                failures.append(str(missing))
                continue
            if found := next(folder.glob(f"{stem}-*.so"), None):
                return found
            try:
                with _alone_in(folder):
                    if found := next(folder.glob(f"{stem}-*.so"), None):
                        return found  # another process has compiled it in the meantime
                    return self._compile_into(folder, stem, compiler)
            except MissingError as missing:
                failures.append(str(missing))
            except OSError as error:
                raise MissingError(
                    f"{folder} could not be written: {error}. Set WIRINGS_CACHE to another folder."
                ) from error
        raise MissingError(" ".join(failures))

    def _compile_into(self, folder: Path, stem: str, compiler: list[str]) -> Path:
        """Compile the library into a folder. Its name ends in a checksum, by which damaged ones are recognised."""
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as private:  # nobody else may write here
            part = Path(private) / "library.so"
            self.compile(compiler, part)
            part.chmod(0o755)  # whatever the umask is
            with part.open("rb") as file:
                os.fsync(file.fileno())
            library = folder / f"{stem}-{_digest([part.read_bytes()])}.so"
            os.replace(part, library)
        return library

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


def opened(library: Path, declare: Declare = identity) -> ctypes.CDLL:
    """Open a library of the cache and declare its functions; raises `MissingError`.

    The file is opened once, so what is checked is what is loaded, even if its name refers to another file by then.
    """
    try:
        file = open_trusted(library)
    except (OSError, UntrustedError) as error:
        raise DamagedError(f"{library} cannot be loaded: {error}.") from error
    name = _name_of(file, library)
    try:
        with open(file, "rb", closefd=False) as content:
            if _digest([content.read()]) != library.stem.rpartition("-")[2]:  # the loader would not survive it
                raise DamagedError(f"{library} is damaged.")
        return declare(ctypes.CDLL(name))
    except OSError as error:
        said = str(error).replace(name, str(library))
        raise MissingError(
            f"{said}. Remove {library} to have it built again, or set WIRINGS_CACHE to a folder from which libraries "
            "can be loaded."
        ) from error
    except AttributeError as error:
        raise DamagedError(f"{library} is not a library of wirings: {error}.") from error
    finally:
        os.close(file)


def _name_of(file: int, library: Path) -> str:
    """A path by which the system's loader opens this very file."""
    # Descriptors are used again, but the loader takes two libraries of one name for the same: count them with "./".
    name = f"/proc/self/fd/{'./' * next(_loads)}{file}"
    try:
        if os.path.samestat(os.stat(name), os.fstat(file)):
            return name
    except OSError:  # not Linux
        pass
    return os.path.realpath(library)  # it stays the same file: nobody else may write to the folders above


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


def cpu_name() -> str:
    """The processor and its number of cores, for people."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} cores)" if names else platform.processor() or platform.machine()


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
        for made in [] if lock is None else lock.made:
            made.chmod(made.stat().st_mode & ~0o022)  # whatever the umask is, or it would not be trusted
        yield
    finally:
        if lock is not None:
            lock.release()


def _digest(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]
