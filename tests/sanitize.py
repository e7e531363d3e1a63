"""Run what is compiled under AddressSanitizer and UndefinedBehaviorSanitizer: ``python -m tests.sanitize``.

The kernels are compiled with both into a cache of their own. Whatever a sanitizer finds ends the process that runs the
kernels, which fails the test or is counted as a crash of the case.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLAGS = "-g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
LIBRARIES = ("libasan.so", "libubsan.so")
CACHE = ROOT / "build" / "sanitize"
TESTS = ("tests/engine", "tests/selection/test_compiled.py")
"""The tests of everything that is compiled: the kernels of the engine, and the selection of edges."""


def compiler() -> str | None:
    """A GCC that has the sanitizers' libraries, or None."""
    found = shutil.which("g++")
    return found if found and all(Path(library_of(found, name)).is_absolute() for name in LIBRARIES) else None


def library_of(compiler: str, name: str) -> str:
    """The path of a library of the compiler; only its name if there is none."""
    done = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def environment(cache: Path = CACHE) -> dict[str, str]:
    """The environment of a process whose kernels are checked. The library is loaded by Python, which is not."""
    found = compiler()
    if found is None:
        raise SystemExit("the sanitizers need g++ with libasan and libubsan")
    return {
        **os.environ,
        "CXX": f"{found} {FLAGS}",
        "WIRINGS_CACHE": str(cache),
        "LD_PRELOAD": " ".join(library_of(found, name) for name in LIBRARIES),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python and PyTorch keep memory until the process ends
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="how many random programs")
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time for the random programs")
    parser.add_argument("--no-tests", action="store_true", help="leave out the tests")
    parser.add_argument("--record", type=Path, help="folder to write a record to, as JSON")
    given = parser.parse_args()
    env, failed, began, tests = environment(), 0, time.monotonic(), "not run"
    if not given.no_tests:
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
        done = subprocess.run(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False)
        tests = done.stdout.strip().splitlines()[-1]
        print(done.stdout if done.returncode else tests, flush=True)
        failed += done.returncode != 0
    words = [sys.executable, "-m", "tests.sanitize_programs", str(given.cases), str(given.seed), str(given.minutes)]
    words += [str(given.record), tests] if given.record else []
    failed += subprocess.run(words, cwd=ROOT, env=env, check=False).returncode != 0
    print(f"{time.monotonic() - began:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
