"""A few random programs under AddressSanitizer and UndefinedBehaviorSanitizer; `make sanitize` runs many."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import sanitize

needs_sanitizers = pytest.mark.skipif(
    sys.platform != "linux" or sanitize.compiler() is None, reason="no g++ with libasan and libubsan"
)


@needs_sanitizers
@pytest.mark.slow
def test_random_programs(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.sanitize_programs", "60", "0", "inf"]
    env = sanitize.environment(tmp_path / "cache")
    done = subprocess.run(words, cwd=sanitize.ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "programs under sanitizers: 60 cases" in done.stdout


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
