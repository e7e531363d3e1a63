"""One process at a time in a folder, by a lock that the kernel releases when the process exits.

The lock is `flock` on the file ``.lock``, which says who holds it and is removed with the lock. On Windows, and on file
systems that have no such locks, nothing keeps a second process out: `held` warns and continues.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from wirings.errors import WiringError

LOCK = ".lock"
HANDED = "WIRINGS_LOCK"
"""Environment variable with the file descriptor of a lock that was inherited from the parent process."""
INSTEAD = "give another --out"
_UNSUPPORTED = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}


class BusyError(WiringError):
    """Another process holds the folder."""


class Lock:
    """A lock on a folder, returned by `take`.

    Args:
        path: the lock file.
        file: the descriptor of the open lock file.
        works: whether the lock keeps other processes out, which not every file system supports.
        made: folders that were created for the lock, the deepest first.
    """

    def __init__(self, path: Path, file: int, works: bool, made: Sequence[Path]) -> None:
        self.path, self.file, self.works, self.made = path, file, works, made

    def environment(self) -> dict[str, str]:
        """The environment variables with which a child process that inherits the descriptor takes over the lock."""
        return {HANDED: str(self.file)}

    def release(self) -> None:
        """Release the lock, even if a forked process has a copy of the descriptor.

        Folders that were created for it and are still empty are removed.
        """
        with contextlib.suppress(OSError):  # before unlocking: afterwards the file may be another process's lock
            self.path.unlink()
            for folder in self.made:
                folder.rmdir()
        if self.works and sys.platform != "win32":
            import fcntl

            fcntl.flock(self.file, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Close this process's descriptor. The lock stays held as long as a process that inherited it is alive."""
        os.close(self.file)


@contextlib.contextmanager
def held(folder: Path, say: Callable[[str], None], instead: str = INSTEAD) -> Iterator[None]:
    """Lock a folder for this process while the context is active; raises `BusyError` if another process holds it.

    Args:
        folder: the folder; created if it does not exist.
        say: called with a warning if the folder cannot be locked.
        instead: what the user can do if the folder cannot be used, for messages.
    """
    try:
        lock = take(folder, instead)
    except OSError as error:
        advice = instead[0].upper() + instead[1:]
        raise WiringError(f"{folder} cannot be written: {error.strerror}. {advice}.") from error
    try:
        if not lock.works:
            say(f"{folder} cannot be locked here: make sure that no other process trains in it.")
        yield
    finally:
        lock.release()


def take(folder: Path, instead: str = INSTEAD) -> Lock:
    """Lock a folder, or take over its lock from the parent process; raises `BusyError` if another process holds it."""
    path = folder / LOCK
    handed, made = _handed(path), [parent for parent in (folder, *folder.parents) if not parent.exists()]
    for _ in range(1000):  # its previous holder may remove it while we open it
        try:
            file = _opened(path) if handed is None else handed
        except FileNotFoundError:
            continue
        try:
            works = _locked(folder, file, instead)
            if not works or _names(path, file):
                _sign(file)
                return Lock(path, file, works, made)
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        handed = None
    raise BusyError(f"{path} keeps being removed by other processes: {instead}.")


def _opened(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A folder of somebody else may have a link here, which must not be written through, or a pipe, which would wait.
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        file = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK):
            raise WiringError(f"{path} is not a regular file. Remove it.") from error
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise WiringError(f"{path} is not a regular file. Remove it.")
    return file


def _locked(folder: Path, file: int, instead: str) -> bool:
    """Lock an open file; False if the platform or the file system does not support it."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:  # the latter from some network file systems
        raise BusyError(f"{folder} is in use by {_holder(file)}. Wait until it ends, stop it, or {instead}.") from error
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


def _handed(path: Path) -> int | None:
    """The inherited descriptor from the environment, if it belongs to this lock; removes the variable."""
    text = os.environ.get(HANDED, "")
    if not text.isdecimal() or not _names(path, int(text)):
        return None
    del os.environ[HANDED]
    os.set_inheritable(int(text), False)
    return int(text)


def _names(path: Path, file: int) -> bool:
    """Whether a path refers to this open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except OSError:
        return False


def _sign(file: int) -> None:
    """Write who holds the lock into its file. It is only used in messages, so a full disk does not matter."""
    since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        os.write(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode())


def _holder(file: int) -> str:
    """Describe the process that holds a lock, from what it wrote into the file."""
    try:
        os.lseek(file, 0, os.SEEK_SET)
        found = json.loads(os.read(file, 1000))
        return f"process {int(found['pid'])} on {found['host']}, since {found['since']}"
    except (OSError, ValueError, TypeError, KeyError):  # not written yet
        return "another process"
