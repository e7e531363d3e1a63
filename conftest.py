"""For examples in docstrings: leave out the modules that need packages which may not be there."""

import importlib.util
from pathlib import Path

_with_triton = [str(path) for path in Path(__file__).parent.glob("wirings/**/_*_cuda.py")]
_callbacks = [str(Path(__file__).parent / "wirings" / "callbacks" / name) for name in ("lightning.py", "trainer.py")]
collect_ignore = _callbacks + ([] if importlib.util.find_spec("triton") else _with_triton)
