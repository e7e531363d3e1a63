"""A few random programs under AddressSanitizer and UndefinedBehaviorSanitizer; `make sanitize` runs many."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import sanitize

needs_sanitizers = pytest.mark.skipif(
    sys.platform != "linux" or sanitize.compiler() is None, reason="no g++ with libasan and libubsan"
)

CASES = 2000
"""Random programs, half of them on tokens and a tenth in int8: half a minute of one core."""
TESTS = ["tests/engine/test_int8.py", "tests/engine/test_generation.py", "-k", "not rejects and not faster"]
"""What programs do not contain: all kernels of int8, and keys and values that are kept from token to token."""


@needs_sanitizers
@pytest.mark.slow
def test_random_programs_and_generation(tmp_path: Path) -> None:
    env = sanitize.environment(tmp_path / "cache")  # one for both, since compiling takes half a minute

    def run(*words: str) -> str:
        words = (sys.executable, "-m", *words)
        done = subprocess.run(words, cwd=sanitize.ROOT, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert f"programs under sanitizers: {CASES:,} cases" in run("tests.sanitize_programs", str(CASES), "0", "inf")
    assert " passed" in run("pytest", "-q", "-p", "no:cacheprovider", *TESTS)


@needs_sanitizers
@pytest.mark.parametrize(("argument", "finding"), [(4, "heap-buffer-overflow"), (2**31 - 1, "signed integer overflow")])
def test_sanitizers_find_planted_bugs(argument: int, finding: str, tmp_path: Path) -> None:
    source, library = tmp_path / "bug.cpp", tmp_path / "bug.so"
    source.write_text(
        '#include <vector>\nextern "C" float bug(int i) { std::vector<float> x(4); volatile int j = i;\n'
        "int k = j > 9 ? j + 1 : j; return x.data()[k]; }\n"
    )
    compiler = sanitize.compiler()
    assert compiler is not None
    subprocess.run([compiler, *sanitize.FLAGS.split(), "-fPIC", "-shared", str(source), "-o", str(library)], check=True)
    call = f"import ctypes; print(ctypes.CDLL({str(library)!r}).bug({argument}))"
    env = sanitize.environment(tmp_path)
    done = subprocess.run([sys.executable, "-c", call], env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert finding in done.stderr
