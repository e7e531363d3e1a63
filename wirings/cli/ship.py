"""``wirings compact`` and ``wirings ship``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from wirings.cli.options import (
    BestOption,
    DataOption,
    ImageSizeOption,
    JsonOption,
    RunArgument,
    at_least,
    out_option,
)
from wirings.utils.console import echo

QUICK_SECONDS, QUICK_EXAMPLES = 0.1, 1000


def compact(
    run: RunArgument,
    out: Annotated[
        Path | None, out_option("File to write: .onnx, .pt2 or .safetensors. Without it, only the report is printed.")
    ] = None,
    best: BestOption = False,
    image_size: ImageSizeOption = None,
) -> None:
    """Remove the dead nodes of a trained run, fold its norms, and write a file that runs without wirings."""
    from wirings.compaction import check_export_path
    from wirings.compaction import compact as compact_model
    from wirings.train.saved_runs import open_run
    from wirings.train.ship_run import example_of

    if out is not None:
        check_export_path(out)
    opened = open_run(run, best, device="cpu")
    small = compact_model(opened.model, example_of(run, opened, image_size, batch=2))
    small.notes["recipe"] = opened.recipe
    echo(str(small.report))
    if out is not None:
        echo(f"wrote {small.save(out)}")


def ship(
    run: RunArgument,
    out: Annotated[
        Path | None,
        out_option("Folder for the files, the report and a picture. Without it, only the report is printed."),
    ] = None,
    best: BestOption = False,
    threads: Annotated[
        int | None,
        typer.Option("--threads", help="Number of threads; by default, as PyTorch.", callback=at_least("--threads", 1)),
    ] = None,
    image_size: ImageSizeOption = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Round weights in the files: float16, bfloat16 or int8. By default, none is."),
    ] = None,
    int8: Annotated[
        bool,
        typer.Option("--int8", help="Compute layers in int8, calibrated on the run's training data."),
    ] = False,
    data: DataOption = None,
    examples: Annotated[
        int | None,
        typer.Option(
            "--examples",
            help="Number of test examples to measure before and after: all by default, none with 0.",
            callback=at_least("--examples", 0),
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help=f"Take short times, and at most {QUICK_EXAMPLES:,} test examples."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compact a trained run, compile it for the CPU, and compare before and after: time, size, work and accuracy."""
    from wirings.train.ship_run import ship_run

    if quick and examples is None:
        examples = QUICK_EXAMPLES
    shipped = ship_run(
        run,
        out=out,
        best=best,
        threads=threads,
        image_size=image_size,
        dtype=dtype,
        quantize="int8" if int8 else None,
        data=data,
        examples=examples,
        seconds=QUICK_SECONDS if quick else 1.0,
    )
    echo(json.dumps(shipped.report.as_mapping(), indent=1) if as_json else str(shipped))
    if out is not None and not as_json:
        echo(f"wrote {', '.join(sorted(path.name for path in out.iterdir()))} to {out}")
