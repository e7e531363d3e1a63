"""Doctests: skip modules that need optional packages."""

import importlib.util
from pathlib import Path

_with_triton = [str(path) for path in Path(__file__).parent.glob("wirings/**/_*_cuda.py")]
_integrations = [
    str(Path(__file__).parent / "wirings" / "train" / "integrations" / name)
    for name in ("lightning.py", "hugging_face.py")
]
_with_hub = [str(Path(__file__).parent / "wirings" / "train" / "hub" / "mixin.py")]
collect_ignore = _integrations + ([] if importlib.util.find_spec("triton") else _with_triton)
collect_ignore += [] if importlib.util.find_spec("huggingface_hub") else _with_hub
