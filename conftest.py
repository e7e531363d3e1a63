"""For examples in docstrings: leave out the modules that need Triton where there is none."""

import importlib.util
from pathlib import Path

_with_triton = [str(path) for path in Path(__file__).parent.glob("wirings/**/_*_cuda.py")]
collect_ignore = [] if importlib.util.find_spec("triton") else _with_triton
