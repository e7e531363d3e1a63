"""``wirings sweep``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wirings.cli.options import DataOption, DeviceOption, MinutesOption, SeedOption, at_least, check_path, out_option
from wirings.errors import WiringError, unknown
from wirings.utils.console import echo
from wirings.utils.signals import StopSignals

if TYPE_CHECKING:
    from wirings.train.sweep.display import SweepDisplay
    from wirings.train.sweep.plan import SweepPlan, SweepRun
    from wirings.train.sweep.schedule import RunProgress, SweepExecutor

PLACES = ("local", "ray")
"""Where a sweep can run."""


def sweep(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE",
            help="Recipes, patterns of recipes such as 'ste/*-2', or YAML files; or one YAML file of a sweep.",
            callback=check_path,
        ),
    ],
    out: Annotated[Path, out_option("Folder of the sweep. The same command continues there.")],
    seed: SeedOption = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting and its values, such as optimizer.lr=0.1,0.05. All combinations run."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            help="Runs at a time. By default as --per-gpu says or, without a GPU, one for every two cores.",
            callback=at_least("--jobs", 1),
        ),
    ] = None,
    per_gpu: Annotated[
        int | None,
        typer.Option(
            "--per-gpu",
            help="Runs that share a GPU. By default as many as train fastest, which the sweep finds out; on Ray, one.",
            callback=at_least("--per-gpu", 1),
        ),
    ] = None,
    on: Annotated[str, typer.Option("--on", help="Run on this machine (local) or on a Ray cluster (ray).")] = "local",
    data: DataOption = None,
    device: DeviceOption = None,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            help="Folder in which to keep results of runs without changed settings, for tables.",
            callback=check_path,
        ),
    ] = None,
    retries: Annotated[
        int, typer.Option("--retries", help="How often a killed run is restarted.", callback=at_least("--retries", 0))
    ] = 3,
    max_minutes: MinutesOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and exit.")] = False,
) -> None:
    """Train many runs, such as: wirings sweep table2/dnw table2/random --seed 0,1,2 --out sweeps/first."""
    from wirings.train.sweep import display, folder, preflight, schedule
    from wirings.utils.files import check_folder
    from wirings.utils.locks import held

    if on not in PLACES:
        raise unknown("place (--on)", on, PLACES)
    runs = plan_of(what, seed, change).runs()
    if device is not None and ":" in device:
        raise WiringError(f"--device must be cuda or cpu for a sweep, got {device}. Choose with CUDA_VISIBLE_DEVICES.")
    if max_minutes == 0:
        raise WiringError("--max-minutes must be more than 0 for a sweep.")
    preflight.check_runs(runs, data)
    if dry_run:
        for run in runs:
            echo(run.path + (f" (starts from {run.start.path})" if run.start is not None else ""))
        return
    folder.check_sweep_folder(out, runs)
    if results is not None:
        check_folder(results, "--results")
    executor = _executor(on, jobs, per_gpu, device)  # before anything is written: it may raise
    try:
        with held(out, echo), display.SweepDisplay() as shown, StopSignals() as signals:
            folder.claim_sweep_folder(out, runs)
            shown.say(f"{len(runs)} runs, {executor}; see {out}")
            states: list[RunProgress] = []
            try:
                options: dict[str, Any] = {"data": None if data is None else data.resolve(), "device": device}
                states = schedule.run_sweep(
                    runs, out, executor, shown, retries=retries, max_minutes=max_minutes, **options
                )
            except KeyboardInterrupt:
                if results is not None:
                    keep_results(runs, out, results, shown)
                done = sum(folder.has_result(out / run.path) for run in runs)
                shown.say(f"Interrupted: {done} of {len(runs)} runs are finished. The same command continues.")
                raise typer.Exit(signals.exit_status) from None
        shown.console.print(display.results_table(schedule.summarize_sweep(states)))
        if results is not None:
            keep_results(runs, out, results, shown)
    finally:
        executor.stop()
    _report_failures(states, shown)


def _report_failures(states: Sequence[RunProgress], shown: SweepDisplay) -> None:
    """Say which runs failed, and exit with status 1 if any run is not finished."""
    from wirings.train.sweep.schedule import FAILED, FINISHED

    failed = [state for state in states if state.status == FAILED]
    for state in failed:
        shown.say(f"\n{state.run.path} failed: {state.reason}")
    unfinished = sum(state.status != FINISHED for state in states)
    if unfinished:
        shown.say(
            f"\n{unfinished} of {len(states)} runs are not finished, {len(failed)} of them failed. The same command "
            "continues."
        )
        raise typer.Exit(1)


def plan_of(what: Sequence[str], seed: Sequence[str] | None, change: Sequence[str] | None) -> SweepPlan:
    """The plan that the command line asks for, on top of that of a sweep's file, if one is given."""
    from wirings.train.recipes import is_file
    from wirings.train.sweep.plan import SweepPlan, is_sweep_file, parse_seeds, parse_values, read_sweep_file

    if seed:  # some write --seed 0 1 2, and no recipe has a number as its name
        seed = [*seed, *(word for word in what if word.isdecimal())]
        what = [word for word in what if not word.isdecimal()]
    plan = SweepPlan(what)
    sweeps = [Path(word) for word in what if is_file(word) and is_sweep_file(Path(word))]
    if sweeps:
        if len(what) > 1:
            raise WiringError(f"{sweeps[0]} describes a whole sweep. Give it alone, and add other recipes to it.")
        plan = read_sweep_file(sweeps[0])
    if seed:
        plan = replace(plan, seeds=parse_seeds(seed))
    grid = [parse_values(text) for text in change or []]
    keys = {values[0].partition("=")[0] for values in grid}
    kept = [values for values in plan.grid if values[0].partition("=")[0] not in keys]
    return replace(plan, grid=[*kept, *grid])


def _executor(on: str, jobs: int | None, per_gpu: int | None, device: str | None) -> SweepExecutor:
    if on == "ray":
        from wirings.train.sweep.on_ray import RayExecutor

        return RayExecutor(jobs, per_gpu or 1, device)
    from wirings.train.sweep.local import LocalExecutor

    return LocalExecutor(jobs, per_gpu, device)


def keep_results(runs: Sequence[SweepRun], out: Path, results: Path, shown: SweepDisplay) -> None:
    """Copy the results of finished runs without changed settings to ``results``. Existing files are left alone."""
    from wirings.train.results import path_of, read, write
    from wirings.train.run.folder import RESULT
    from wirings.train.sweep.folder import has_result

    for run in runs:
        if not run.requested or not has_result(out / run.path):
            continue
        own = out / run.path / RESULT
        result = read(own)
        path = path_of(results, result.recipe, result.seed)
        if result.overrides:
            continue
        if not path.exists():
            shown.say(f"wrote {write(result, results)}")
        elif path.read_bytes() != own.read_bytes():
            shown.say(f"{path} holds another result, which was kept")
