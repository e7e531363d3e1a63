"""The memory of this machine, and the limits of containers, which Linux shows in files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wirings.utils import memory

GIB = 2**30


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 64 GiB, without containers."""
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "_MACHINE", tmp_path / "meminfo")
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 64 * GIB // 4096, "SC_PAGE_SIZE": 4096}.__getitem__)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_containers(root: Path) -> None:
    assert memory.installed_memory() == 64 * GIB


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": f"{4 * GIB}\n"}, 4),
        ("0::/\n", {"memory.max": "max\n"}, 64),
        ("0::/a/b\n", {"a/memory.max": f"{3 * GIB}\n", "a/b/memory.max": "max\n"}, 3),
        ("0::/a/b\n", {"a/memory.max": f"{3 * GIB}\n", "a/b/memory.max": f"{2 * GIB}\n"}, 2),
        ("0::/a\n", {"b/memory.max": f"{2 * GIB}\n"}, 64),
        ("4:cpu:/\n3:memory:/\n", {"memory/memory.limit_in_bytes": f"{5 * GIB}\n"}, 5),
        ("3:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 64),
        ("3:cpu,memory:/docker/x\n0::/\n", {"memory/docker/x/memory.limit_in_bytes": f"{6 * GIB}\n"}, 6),
        ("3:memory:/docker/x\n", {"memory/memory.limit_in_bytes": f"{7 * GIB}\n"}, 7),
        ("nonsense", {"memory.max": f"{8 * GIB}\n"}, 8),
        ("0::/../../a\n", {"a/memory.max": f"{9 * GIB}\n"}, 9),
        ("0::/\n", {"memory.max": "\n"}, 64),
        ("0::/\n", {"memory.max": "0\n"}, 64),
        ("0::/\n", {"memory.max": f"{640 * GIB}\n"}, 64),
    ],
)
def test_limits_of_containers(root: Path, own: str, limits: dict[str, str], expected: int) -> None:
    write(root / "own", own)
    for name, text in limits.items():
        write(root / "cgroup" / name, text)
    assert memory.installed_memory() == expected * GIB


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        ({"meminfo": f"MemFree: 1 kB\nMemAvailable: {10 * 2**20} kB\n"}, 10),
        ({"cgroup/memory.max": f"{8 * GIB}", "cgroup/memory.current": f"{3 * GIB}", "cgroup/memory.stat": "anon 5"}, 5),
        (
            {
                "cgroup/memory.max": f"{8 * GIB}",
                "cgroup/memory.current": f"{3 * GIB}",
                "cgroup/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            6,
        ),
        (
            {
                "cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}",
                "cgroup/memory/memory.usage_in_bytes": f"{5 * GIB}",
                "cgroup/memory/memory.stat": f"total_inactive_file {GIB}\n",
            },
            4,
        ),
        ({"cgroup/memory.max": f"{8 * GIB}", "cgroup/memory.current": f"{9 * GIB}", "cgroup/memory.stat": ""}, 0),
        ({"cgroup/memory.max": f"{8 * GIB}"}, 8),
        ({"meminfo": "MemAvailable: nonsense\n"}, 64),
    ],
)
def test_what_is_available(root: Path, files: dict[str, str], expected: int) -> None:
    for name, text in files.items():
        write(root / name, text)
    assert memory.available_memory() == expected * GIB


def test_a_limit_on_addresses() -> None:
    code = (
        "import resource, sys; from wirings.utils.memory import available_memory as left\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36)); before = left(); kept = bytearray(2**28)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**36)); sys.exit(not 0 <= left() < 2**31 - 2**28)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_this_machine() -> None:
    assert 2**20 < memory.available_memory() <= memory.installed_memory()
    assert 2**20 < memory.installed_memory() < 2**50
