"""Random programs in a process whose kernels are checked by sanitizers; `tests.sanitize` starts it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.fuzz import records
from tests.fuzz.programs import FUZZERS
from tests.fuzz.runner import run
from wirings.engine.build import SOURCE
from wirings.utils.cache import cache_folder
from wirings.utils.compiler import compilers


def main(cases: int, first: int, minutes: float, folder: str = "", tests: str = "") -> int:
    """Run the programs, after a check that the kernels are those with the sanitizers."""
    fuzzer = FUZZERS["programs"]
    fuzzer.prepare(Path())
    library = SOURCE.built(compilers(os.environ["CXX"]), SOURCE.own_folder(cache_folder()))
    content = library.read_bytes()
    assert b"__asan_report_load" in content, "the kernels are not checked"
    assert b"__ubsan_handle" in content, "the kernels are not checked"
    outcomes = run(fuzzer, range(first, first + cases), minutes)
    print(f"programs under sanitizers: {outcomes}", *outcomes.mistakes, sep="\n  ", flush=True)
    if folder:
        records.save(Path(folder), "sanitizers", first, outcomes, tests=tests)
    return int(outcomes.found > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:]))
