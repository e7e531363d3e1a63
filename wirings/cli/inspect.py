"""``wirings eval``, ``bleu``, ``predict``, ``profile`` and ``show``: look at a trained run or at a recipe's network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from wirings.cli.options import (
    BestOption,
    DataOption,
    DeviceOption,
    ImageSizeOption,
    JsonOption,
    OverwriteOption,
    ResultsOption,
    RunArgument,
    at_least,
    check_path,
    out_option,
)
from wirings.errors import WiringError
from wirings.utils.console import echo
from wirings.utils.text import printable


def evaluate(
    run: RunArgument,
    best: BestOption = False,
    data: DataOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a trained run on the test set: its accuracy or, of text, bits per byte or the loss."""
    from wirings.train.data.metrics import ACCURACY
    from wirings.train.saved_runs import measure_by

    found = measure_by(run, best=best, data=data, device=device)
    metric, value = found.metric, found.value
    more = {} if metric == ACCURACY else {metric.name: value}
    if as_json:
        echo(json.dumps({"run": run, **more, "accuracy": found.accuracy, "top5": found.top5, "loss": found.loss}))
    elif more:
        echo(f"{run}: {metric.format(value)}{metric.remark(value)}, next token {found.accuracy:.2f} %")
    else:
        echo(f"{run}: {found.accuracy:.2f} % (top 5 {found.top5:.2f} %), loss {found.loss:.4f}")


def bleu(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders of runs that translate.", callback=check_path)
    ],
    results: ResultsOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Compute the BLEU of finished runs from the translations in their folders, without the model and its data."""
    from wirings.train.results import path_of, write
    from wirings.train.translations import score_translations

    for run in runs:
        result = score_translations(run)
        if results is not None and not overwrite and (path := path_of(results, result.recipe, result.seed)).exists():
            raise WiringError(f"{path} holds a result already. Give --overwrite, or another --results folder.")
        echo(f"{run}: {result}")
        if results is not None:
            echo(f"wrote {write(result, results, overwrite=overwrite)}")


def predict(
    run: RunArgument,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE", help="Image files.", callback=check_path)],
    best: BestOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Classify images with a trained run: the three most likely classes of each."""
    from wirings.train.saved_runs import predict as predict_images

    found = predict_images(run, images, best=best, device=device)
    if as_json:
        echo(json.dumps([{"image": str(path), "classes": dict(guesses)} for path, guesses in found], indent=1))
        return
    for path, guesses in found:
        text = ", ".join(f"{name} {100 * probability:.1f} %" for name, probability in guesses)
        echo(printable(f"{path}: {text}"))


def profile(
    network: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|RUN",
            help="A recipe (its network before training), or the folder of a run (its trained network).",
            callback=check_path,
        ),
    ],
    trained: Annotated[
        bool, typer.Option("--trained", help="Use the trained network of this name that comes with the package.")
    ] = False,
    best: BestOption = False,
    image_size: ImageSizeOption = None,
    classes: Annotated[
        int | None,
        typer.Option(
            "--classes",
            help="Number of classes, if the recipe's data set does not fix it.",
            callback=at_least("--classes", 1),
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Count the parameters and multiply-adds of a network, layer by layer: as the paper does, and of live nodes."""
    from wirings.profiling import profile as count
    from wirings.train.networks import open_network

    found = open_network(network, trained=trained, best=best, image_size=image_size, classes=classes)
    counted = count(found.model, found.shape)
    echo(json.dumps(counted.as_dict(), indent=1) if as_json else f"{found.title}\n{counted}")


def show(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Folder of a run, file of a history, or name of a trained network that comes with the package.",
            callback=check_path,
        ),
    ],
    html: Annotated[bool, typer.Option("--html", help="Write one HTML page that plays the history.")] = False,
    out: Annotated[Path | None, out_option("File of the page; RUN/history.html by default.")] = None,
    pictures: Annotated[
        Path | None, typer.Option("--pictures", help="Folder to write pictures to.", callback=check_path)
    ] = None,
    svg: Annotated[bool, typer.Option("--svg", help="Write pictures as SVG instead of PNG.")] = False,
    whole: Annotated[
        bool,
        typer.Option("--whole", help="Draw every node on the page, even of transformers and networks that are large."),
    ] = False,
    heads: Annotated[
        int | None,
        typer.Option("--heads", min=1, help="Attention heads of each block, if the history does not know them."),
    ] = None,
) -> None:
    """Show the wiring of a run, and how it changed in training."""
    from wirings import draw
    from wirings.train.run_history import load_run_history

    if (out is not None or whole) and not html:
        raise WiringError("--out and --whole are options of the page. Add --html.")
    if svg and pictures is None:
        raise WiringError("--svg is an option of pictures. Add --pictures FOLDER.")
    history, title, note = load_run_history(run)
    if heads is not None:
        history.structure = history.structure.with_heads(heads)
    in_terminal = not html and pictures is None
    if in_terminal:
        echo(draw.summary(history, title))
    if note:
        echo(f"\n{note}" if in_terminal else note)
    if html:
        if note:
            history.about["note"] = note
        folder = Path(run)
        usual = folder / "history.html" if folder.is_dir() else Path(f"{run.strip('./').replace('/', '-')}.html")
        path = draw.write_page(history, out or usual, title, whole)
        echo(f"wrote {path} ({path.stat().st_size / 1e6:.2f} MB): open it in a browser")
    if pictures is not None:
        for path in draw.save_pictures(history, pictures, "svg" if svg else "png", title):
            echo(f"wrote {path}")
