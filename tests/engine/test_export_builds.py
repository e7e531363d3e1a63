"""Exported networks on other compilers and processors, and under sanitizers: they compute what the engine does."""

import platform
import shutil
from pathlib import Path

import pytest

from tests.engine import exported

pytestmark = [pytest.mark.slow, exported.needs_gpp]


@pytest.mark.parametrize("name", exported.NETWORKS)
def test_networks(name: str, tmp_path: Path) -> None:
    fast = exported.network(name)
    exported.build(fast.export(tmp_path))
    exported.check_equal(fast, tmp_path)


@pytest.mark.parametrize("name", exported.NETWORKS)
def test_sanitizers_report_nothing(name: str, tmp_path: Path) -> None:
    fast = exported.network(name)
    fast.export(tmp_path)
    exported.build(tmp_path, "g++", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    exported.check_equal(fast, tmp_path, 1e-5)
    for threads in (1, 3):
        exported.check_equal(fast, tmp_path, 1e-5, batches=[4], threads=threads)


@pytest.mark.skipif(not shutil.which("clang++"), reason="there is no clang++")
@pytest.mark.parametrize("name", ["nodes", "recurrent", "graph", "experts", "bfloat16", "gpt"])
def test_clang(name: str, tmp_path: Path) -> None:
    fast = exported.network(name)
    exported.build(fast.export(tmp_path), "clang++")
    exported.check_equal(fast, tmp_path, 1e-5)


@pytest.mark.skipif("x86" not in platform.machine(), reason="the targets are for x86")
@pytest.mark.parametrize("target", ["avx2", "sse"])
@pytest.mark.parametrize("name", ["random", "recurrent", "graph", "experts", "bfloat16", "gpt"])
def test_narrower_vectors(name: str, target: str, tmp_path: Path) -> None:
    fast = exported.network(name)
    exported.build(fast.export(tmp_path, target=target))
    exported.check_equal(fast, tmp_path, 1e-5)


@pytest.mark.skipif(
    not shutil.which("aarch64-linux-gnu-g++") or not shutil.which("qemu-aarch64"),
    reason="there is no compiler for AArch64, or no qemu-aarch64",
)
@pytest.mark.parametrize("name", ["random", "recurrent", "experts", "bfloat16", "gpt"])
def test_aarch64(name: str, tmp_path: Path) -> None:
    fast = exported.network(name)
    exported.build(fast.export(tmp_path, target="neon"), "aarch64-linux-gnu-g++")
    exported.check_equal(fast, tmp_path, 1e-5, runner=["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"])
