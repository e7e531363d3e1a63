"""`wirings.load`: a trained network in one line."""

from __future__ import annotations

from os import PathLike

from torch import nn

from wirings.errors import WiringError, unknown


def load(name: str | PathLike[str]) -> nn.Module:
    """Open a trained network that comes with the package, or that of a run.

    Args:
        name: a name such as ``"table2/dnw"``; ``wirings models`` lists them. Or the folder of a run.

    Returns:
        Plain modules with exact zeros, on the CPU and in evaluation mode. To train on with the same zeros, wire it:
        ``wirings.wire_(model, "keep")``.

    >>> model = load("table1/static-dnw")
    >>> int(model.graph.weight.count_nonzero())
    32000
    """
    try:
        from wirings.train import bundled
        from wirings.train.saved_runs import open_run
    except ModuleNotFoundError as error:
        raise WiringError(f"wirings.load() needs the package {error.name}: pip install wirings[train]") from error
    from wirings.utils.files import check_path
    from wirings.wire.finalize import finalize_
    from wirings.wire.parametrization import wired

    if not check_path(name, "a name or a folder").is_dir() and str(name) not in bundled.names():
        raise unknown("trained network", str(name), bundled.names())
    model = open_run(str(name), device="cpu").model
    return finalize_(model) if wired(model) else model
