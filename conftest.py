"""For examples in docstrings: leave out the module that needs Triton where there is none."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("triton") else ["wirings/_select_cuda.py"]
