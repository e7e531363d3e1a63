"""The command line: parses, calls the library, prints."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import rich
import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from wirings.cli import demo as demonstration
from wirings.cli.sweep import sweep
from wirings.errors import WiringError
from wirings.profiling import profile as count
from wirings.version import __version__

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Learn how a neural network is wired while it trains."
)


def _version(wanted: bool) -> None:
    if wanted:
        rich.print(f"wirings {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command()
def demo(
    seeds: Annotated[int, typer.Option(help="Networks to train for each rule.")] = 5,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("demo.png"),
) -> None:
    """Learn a wiring on embedded digits, beside a random one with as many edges; under a minute."""
    if not out.parent.is_dir() or out.suffix != ".png":
        raise WiringError(f"--out must be a .png file in a folder that exists, but it is {out}.")
    settings = demonstration.Settings(seeds=seeds)
    started = time.perf_counter()
    torch.set_num_threads(1)  # the matrices are small: a second thread would only wait
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("", total=2 * settings.runs)
        begun = 0

        def progress(what: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=what.ljust(28))
            begun += 1

        outcomes = demonstration.compare(settings, progress=progress)
        bar.update(task, completed=begun, description="done".ljust(28))
    images = len(demonstration.splits()[1].y_test)
    table = Table(title=f"8×8 digits, {settings.seeds} seeds, accuracy on {images} test images")
    for column in ("rule", "learning rate", "edges", "density", "edges swapped", "accuracy"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for outcome in outcomes:
        swapped = sum(outcome.swapped) / len(outcome.swapped)
        accuracy = f"{outcome.mean:.2f} ± {outcome.std:.2f} %"
        edges, density = f"{outcome.edges:,}", f"{100 * settings.density:g} %"
        table.add_row(outcome.rule, f"{outcome.lr:g}", edges, density, f"{swapped:,.0f}", accuracy)
    rich.print(table)
    best, other = sorted(outcomes, key=lambda outcome: -outcome.mean)
    gap, pooled = best.mean - other.mean, best.ahead_of(other)
    rich.print(f"{best.rule} is ahead by {gap:.2f} points, {pooled:.1f} pooled standard deviations.")
    demonstration.draw(outcomes, str(out))
    rich.print(f"Wrote the two wirings to {out}. It took {time.perf_counter() - started:.0f} s.")


@app.command()
def recipes() -> None:
    """Every row of every table, with what the paper reports."""
    from wirings.cli.console import output
    from wirings.train import recipes as rows

    shown = Table()
    for column in ("recipe", "model", "rule", "data", "epochs", "the paper's accuracy", ""):
        shown.add_column(column, overflow="fold")
    for name in rows.names():
        recipe = rows.get(name)
        settings, paper = recipe.settings, recipe.paper or {}
        accuracy = str(paper.get("accuracy", paper.get("published", "")))
        accuracy += f" ± {paper['std']} %" if "std" in paper else ""
        about = (settings.model.name, settings.rule.name, settings.data.name, str(settings.epochs))
        shown.add_row(name, *about, accuracy, recipe.note or "")
    output().print(shown)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (see `wirings recipes`), or a YAML file of your own.")],
    seed: Annotated[list[int] | None, typer.Option(help="May be given several times: one run each.")] = None,
    change: Annotated[list[str] | None, typer.Option("--set", help="A setting, such as optimizer.lr=0.2.")] = None,
    data: Annotated[Path | None, typer.Option(help="The folder with the data.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; by default runs/RECIPE/seedN.")] = None,
    resume: Annotated[
        bool, typer.Option(help="Go on from the last checkpoint in the folder, if there is one.")
    ] = False,
    start: Annotated[
        Path | None, typer.Option(help="For recipes that start from a trained network: the folder of its run.")
    ] = None,
    max_minutes: Annotated[float | None, typer.Option(help="Stop each run at a checkpoint after so long.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default a GPU where there is one.")] = None,
    results: Annotated[Path | None, typer.Option(help="Keep the result in this folder, too.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Let it take the place of a result that is there.")] = False,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard files into the run's folder.")] = False,
) -> None:
    """Train a recipe: wirings train table1/static-dnw --seed 1."""
    from wirings.train import recipes as rows
    from wirings.train.distributed import leave
    from wirings.train.log import Log, Shown
    from wirings.train.phases import train as run
    from wirings.train.results import path_of, write
    from wirings.train.settings import with_overrides
    from wirings.utils.files import check_folder

    found = rows.get(recipe)
    settings, overrides = with_overrides(found.settings, change or [])
    seeds = seed or [settings.seed]
    if max_minutes is not None and not max_minutes >= 0:
        raise WiringError(f"--max-minutes must be a number of minutes, not {max_minutes:g}.")
    for option, folder in (("--out", out), ("--start", start)):
        if len(seeds) > 1 and folder is not None:
            raise WiringError(f"{option} names the folder of one run; leave it out, or give one --seed.")
    if data is not None:  # where the data lies is no change of the recipe
        settings = replace(settings, data=replace(settings.data, directory=str(data)))
    if results is not None:
        check_folder(results, "--results")
    for number in seeds if results is not None and not overwrite else []:  # before hours of work, not after
        if (place := path_of(results, found.name, number)).exists():  # type: ignore[arg-type]
            raise WiringError(f"{place} holds a result already: give --overwrite, or another --results folder.")
    first = os.environ.get("RANK", "0") == "0"
    for number in seeds:
        one = replace(settings, seed=number)
        folder = out or Path("runs") / found.name / f"seed{number}"
        log = Shown(tensorboard) if first else Log()
        begun = {"device": device, "resume": resume, "max_minutes": max_minutes, "overrides": overrides, "log": log}
        result = run(found.name, one, folder, first_run=start, **begun)  # type: ignore[arg-type]
        if result is not None:
            log.say(f"{found.name}, seed {number}: {result.accuracy:.2f} % after {result.wall_s:.0f} s; see {folder}")
            if results is not None:
                log.say(f"wrote {write(result, results, overwrite=overwrite)}")
    leave()


app.command()(sweep)


@app.command("eval")
def evaluate(
    run: Annotated[str, typer.Argument(help="A run's folder, or a trained network that comes with the package.")],
    best: Annotated[bool, typer.Option(help="The best epoch's checkpoint instead of the last.")] = False,
    data: Annotated[Path | None, typer.Option(help="The folder with the data.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu.")] = None,
) -> None:
    """The accuracy of a trained run on the test set."""
    from wirings.train.runs import measure

    loss, accuracy, top5 = measure(run, best=best, data=data, device=device)
    rich.print(f"{run}: {accuracy:.2f} % (top 5 {top5:.2f} %), loss {loss:.4f}")


@app.command()
def predict(
    run: Annotated[str, typer.Argument(help="A run's folder, or a trained network that comes with the package.")],
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    device: Annotated[str | None, typer.Option(help="cuda or cpu.")] = None,
) -> None:
    """What a trained run sees in images."""
    from wirings.train.runs import predict as look

    for path, guesses in look(run, images, device=device):
        rich.print(f"{path}: " + ", ".join(f"{name} {100 * p:.1f} %" for name, p in guesses))


@app.command()
def table(
    number: Annotated[str, typer.Argument(help="The table's number in the paper, or appendix_b, resnet or ste.")],
    results: Annotated[Path, typer.Option(help="The folder of results.")] = Path("results"),
    markdown: Annotated[bool, typer.Option(help="As Markdown.")] = False,
    count: Annotated[bool, typer.Option(help="Count networks whose size the paper has and no result says.")] = True,
) -> None:
    """A table of the paper: its figures beside the measured ones. `ste`: every rule at one budget, and its costs."""
    from wirings.train import leaderboard, tables

    if number == leaderboard.TABLE:
        boards = leaderboard.boards(results)
        typer.echo(leaderboard.markdown(boards) if markdown else leaderboard.render(boards))
    else:
        found = tables.table(number, results, count)
        typer.echo(tables.markdown(found) if markdown else tables.render(found))
    if not results.is_dir():
        typer.echo(f"There is no folder {results} here, so no row has a result: --results names another.", err=True)


@app.command()
def profile(
    network: Annotated[
        str, typer.Argument(help="A recipe (its network before training), or the folder of a run (the trained one).")
    ],
    trained: Annotated[
        bool, typer.Option(help="The trained network of that name which comes with the package.")
    ] = False,
    best: Annotated[bool, typer.Option(help="Of a run, the best epoch's checkpoint instead of the last.")] = False,
    image_size: Annotated[int | None, typer.Option(help="Count for square images of so many pixels a side.")] = None,
    classes: Annotated[int | None, typer.Option(help="Where the recipe's data does not say how many.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Parameters and multiply-adds of a network, layer by layer: as the paper counts them, and live."""
    from wirings.train.untrained import opened

    found = opened(network, trained=trained, best=best, image_size=image_size, classes=classes)
    counted = count(found.model, found.shape)
    typer.echo(json.dumps(counted.as_dict(), indent=1) if as_json else f"{found.title}\n{counted}")


@app.command()
def compact(
    run: Annotated[str, typer.Argument(help="A run's folder, or a trained network that comes with the package.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write: .onnx, .pt2 or .safetensors.")
    ] = None,
    best: Annotated[bool, typer.Option(help="The best epoch's checkpoint instead of the last.")] = False,
    image_size: Annotated[int | None, typer.Option(help="For square images of so many pixels a side.")] = None,
) -> None:
    """A trained run without dead nodes, norms folded, as a file that runs without wirings."""
    from wirings.compaction import check_path
    from wirings.compaction import compact as made_compact
    from wirings.train.runs import open_run

    if out is not None:
        check_path(out)
    model, settings, name, _ = open_run(run, best, device="cpu")
    shape = getattr(model, "input_shape", None)
    if shape is None:
        raise WiringError(
            f"the model {settings.model.name!r} of {run} does not say what it takes (input_shape), so there is no "
            "example to compact it with; do it in Python: wirings.compact(model, example_input)."
        )
    sides = shape[1:] if image_size is None else (image_size,) * len(shape[1:])
    example = torch.randn(2, shape[0], *sides, generator=torch.Generator().manual_seed(0))
    small = made_compact(model, example)
    small.notes["recipe"] = name
    typer.echo(str(small.report))
    if out is not None:
        typer.echo(f"wrote {small.save(out)}")


@app.command()
def show(
    run: Annotated[
        str, typer.Argument(help="A run's folder, a history's file, or a trained network that comes with the package.")
    ],
    html: Annotated[bool, typer.Option("--html", help="Write one HTML page that plays the history.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page's file; by default RUN/history.html.")
    ] = None,
    pictures: Annotated[Path | None, typer.Option(help="Write pictures to this folder.")] = None,
    svg: Annotated[bool, typer.Option("--svg", help="Pictures as SVG instead of PNG.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Draw node by node what is too large for it, too.")] = False,
) -> None:
    """How a run's wiring looks, and how it came to be."""
    from wirings import draw
    from wirings.train.run_history import look_at

    if (out is not None or whole) and not html:
        raise WiringError("--out and --whole belong to the page: give --html as well.")
    if svg and pictures is None:
        raise WiringError("--svg belongs to pictures: give --pictures FOLDER as well.")
    history, title, note = look_at(run)
    if not html and pictures is None:
        typer.echo(draw.summary(history, title))
    if note:
        typer.echo(f"\n{note}" if not html and pictures is None else note)
    if html:
        if note:
            history.about["note"] = note
        folder = Path(run)
        usual = folder / "history.html" if folder.is_dir() else Path(f"{run.strip('./').replace('/', '-')}.html")
        path = draw.write_page(history, out or usual, title, whole)
        typer.echo(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB): open it in a browser")
    if pictures is not None:
        for path in draw.album(history, pictures, "svg" if svg else "png", title):
            typer.echo(f"wrote {path}")


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="Which data: cifar10.")],
    directory: Annotated[Path | None, typer.Option(help="A folder that holds it already, in any known layout.")] = None,
) -> None:
    """Fetch, check and prepare a data set."""
    if name != "cifar10":
        raise WiringError(
            f"{name!r} cannot be fetched; only cifar10 can. Other data is read from your own folder: --data."
        )
    from wirings.train.data import cifar10

    typer.echo(f"ready: {cifar10.prepare(directory)}")
