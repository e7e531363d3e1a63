"""``wirings compact``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from wirings.cli.options import BestOption, ImageSizeOption, RunArgument, out_option
from wirings.errors import WiringError
from wirings.utils.console import echo


def compact(
    run: RunArgument,
    out: Annotated[
        Path | None, out_option("File to write: .onnx, .pt2 or .safetensors. Without it, only the report is printed.")
    ] = None,
    best: BestOption = False,
    image_size: ImageSizeOption = None,
) -> None:
    """Remove the dead nodes of a trained run, fold its norms, and write a file that runs without wirings."""
    import torch

    from wirings.compaction import check_export_path
    from wirings.compaction import compact as compact_model
    from wirings.train.saved_runs import open_run

    if out is not None:
        check_export_path(out)
    model, settings, name, _ = open_run(run, best, device="cpu")
    shape = getattr(model, "input_shape", None)
    if shape is None:
        raise WiringError(
            f"model {settings.model.name!r} of {run} has no attribute input_shape, which compaction needs for an "
            "example. Call wirings.compact(model, example_input) in Python instead."
        )
    sides = shape[1:] if image_size is None else (image_size,) * len(shape[1:])
    example = torch.randn(2, shape[0], *sides, generator=torch.Generator().manual_seed(0))
    small = compact_model(model, example)
    small.notes["recipe"] = name
    echo(str(small.report))
    if out is not None:
        echo(f"wrote {small.save(out)}")
