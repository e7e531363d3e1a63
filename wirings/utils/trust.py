"""Whether only this user, or root, can have written a file: asked of everything that is loaded as code.

A file is trusted if it, its folder and the folders above belong to the user or root, and nobody else may write there.
The folders above count because whoever may write to one of them can replace what is below it. They count up to the
user's home: whoever can replace that, can run code as the user anyway. A folder like /tmp, in which everybody may write
but the sticky bit protects the entries of others, may be above the file's folder, but not be that folder: its entries
are checked one by one, and others cannot rename those that belong to the user.

The folders are checked from the top down. So once one is trusted, nobody can change its entries any more, and the
answer stays true after the check. On systems without owners and modes (Windows), every file is trusted.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

_OWNERS = sys.platform != "win32"


class UntrustedError(Exception):
    """Somebody else may have written a file; the message says why."""


def open_trusted(path: Path) -> int:
    """Open a file for reading if only the user or root can have written it.

    Returns:
        The descriptor, whose owner and mode were checked, so that no other file can take its place.

    Raises:
        UntrustedError: if somebody else may write to the file or to a folder above.
        OSError: if it cannot be opened, which includes symbolic links.
    """
    path = check_trusted_folder(path.parent) / path.name  # without links that may be changed now
    # Without waiting, as opening a named pipe does. O_NOFOLLOW: a link may lead to where anybody can write.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    file = os.open(path, flags)
    try:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode):
            raise UntrustedError(f"{path} is not a file")
        _check(path, info)
    except BaseException:
        os.close(file)
        raise
    return file


def check_trusted_folder(folder: Path) -> Path:
    """Raise `UntrustedError` if anybody but the user and root can write to a folder, or replace it.

    Args:
        folder: the folder. It need not exist; then the existing ones above are checked.

    Returns:
        The folder without symbolic links, which is the one that was checked: a link may lead elsewhere later.
    """
    real = Path(os.path.realpath(folder))
    for path in _chain(real):
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            break
        if stat.S_ISLNK(info.st_mode):  # there was none when the path was resolved
            raise UntrustedError(f"{path} is a link")
        _check(path, info, sticky=path != real)
    return real


def _chain(real: Path) -> list[Path]:
    """The folders to check, from the top down."""
    above = [*reversed(real.parents), real]
    try:
        home = Path(os.path.realpath(Path.home()))
    except RuntimeError:  # there is none
        return above
    return above[above.index(home) :] if home in above else above


def _check(path: Path, info: os.stat_result, sticky: bool = False) -> None:
    if not _OWNERS:
        return
    if info.st_uid not in (os.geteuid(), 0):
        raise UntrustedError(f"{path} belongs to another user ({_user_name(info.st_uid)})")
    if sticky and info.st_mode & stat.S_ISVTX:
        return
    if info.st_mode & stat.S_IWOTH or (info.st_mode & stat.S_IWGRP and not _is_alone_in_group(path, info)):
        raise UntrustedError(f"other users may write to {path} (mode {stat.S_IMODE(info.st_mode):o})")


def _is_alone_in_group(path: Path, info: os.stat_result) -> bool:
    """Whether a file's group is the user's private one, as on systems whose umask lets the group write."""
    if sys.platform == "win32":
        return True
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(info.st_gid)
    except KeyError:
        return False
    if info.st_gid != user.pw_gid or group.gr_name != user.pw_name or set(group.gr_mem) - {user.pw_name}:
        return False
    try:  # with an access control list, the group's bits are those of everybody on the list
        return not hasattr(os, "listxattr") or "system.posix_acl_access" not in os.listxattr(path)
    except OSError:  # the file system has no such lists
        return True


def _user_name(number: int) -> str:
    if sys.platform != "win32":
        import pwd

        try:
            return pwd.getpwuid(number).pw_name
        except KeyError:
            pass
    return str(number)
