"""``wirings sweep``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wirings.cli.options import (
    DataOption,
    DeviceOption,
    DryRunOption,
    JobsOption,
    MinutesOption,
    OnOption,
    PerGpuOption,
    RetriesOption,
    SeedOption,
    check_path,
    out_option,
)
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
    jobs: JobsOption = None,
    per_gpu: PerGpuOption = None,
    on: OnOption = "local",
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
    retries: RetriesOption = 3,
    max_minutes: MinutesOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Train many runs, such as: wirings sweep table2/dnw table2/random --seed 0,1,2 --out sweeps/first."""
    from wirings.train.sweep import folder, preflight
    from wirings.train.sweep.display import results_table
    from wirings.train.sweep.schedule import summarize_sweep
    from wirings.utils.files import check_folder

    check_sweep_options(on, device, max_minutes)
    runs = plan_of(what, seed, change).runs()
    preflight.check_runs(runs, data)
    if dry_run:
        list_runs(runs)
        return
    folder.check_sweep_folder(out, runs)
    if results is not None:
        check_folder(results, "--results")
    executor = executor_for(on, jobs, per_gpu, device)  # before anything is written: it may raise

    def interrupted() -> str:
        done = sum(folder.has_result(out / run.path) for run in runs)
        return f"{done} of {len(runs)} runs are finished."

    def ended(shown: SweepDisplay) -> None:
        if results is not None:
            keep_results(runs, out, results, shown)

    states, shown = execute(
        runs, out, executor, f"{len(runs)} runs", interrupted, ended,
        data=data, device=device, retries=retries, max_minutes=max_minutes,
    )  # fmt: skip
    shown.console.print(results_table(summarize_sweep(states)))
    report_failures(states, shown)


def check_sweep_options(on: str, device: str | None, max_minutes: float | None) -> None:
    """Raise unless a sweep can run there, on that device and for so long."""
    if on not in PLACES:
        raise unknown("place (--on)", on, PLACES)
    if device is not None and ":" in device:
        raise WiringError(f"--device must be cuda or cpu for a sweep, got {device}. Choose with CUDA_VISIBLE_DEVICES.")
    if max_minutes == 0:
        raise WiringError("--max-minutes must be more than 0 for a sweep.")


def list_runs(runs: Sequence[SweepRun]) -> None:
    """Print the folders of runs, a line each."""
    for run in runs:
        echo(run.path + (f" (starts from {run.start.path})" if run.start is not None else ""))


def execute(
    runs: Sequence[SweepRun],
    out: Path,
    executor: SweepExecutor,
    what: str,
    interrupted: Callable[[], str],
    ended: Callable[[SweepDisplay], None],
    *,
    data: Path | None,
    belongs: Callable[[Mapping[str, Any]], bool] = lambda line: False,
    **options: Any,
) -> tuple[Sequence[RunProgress], SweepDisplay]:
    """Train the runs of a sweep in its folder, which is locked meanwhile, and stop the executor.

    Args:
        runs: The runs, at least those to begin with.
        out: The folder.
        executor: Executes the runs.
        what: What there is to do, for the first line.
        interrupted: Says how much is done, after Ctrl-C.
        ended: Called at the end, also after Ctrl-C.
        data: The folder of the data.
        belongs: See `wirings.train.sweep.folder.check_sweep_folder`.
        options: Arguments of `wirings.train.sweep.schedule.run_sweep`.
    """
    from wirings.train.sweep import display, folder, schedule
    from wirings.utils.locks import held

    try:
        with held(out, echo), display.SweepDisplay() as shown, StopSignals() as signals:
            folder.claim_sweep_folder(out, runs, belongs)
            shown.say(f"{what}, {executor}; see {out}")
            where = None if data is None else data.resolve()
            try:
                states = schedule.run_sweep(runs, out, executor, shown, data=where, **options)
            except KeyboardInterrupt:
                ended(shown)
                shown.say(f"Interrupted: {interrupted()} The same command continues.")
                raise typer.Exit(signals.exit_status) from None
        ended(shown)
    finally:
        executor.stop()
    return states, shown


def report_failures(states: Sequence[RunProgress], shown: SweepDisplay) -> None:
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
    from wirings.train.sweep.plan import SweepPlan, is_sweep_file, parse_values, read_sweep_file

    what, seeds = split_seeds(what, seed)
    plan = SweepPlan(what)
    sweeps = [Path(word) for word in what if is_file(word) and is_sweep_file(Path(word))]
    if sweeps:
        if len(what) > 1:
            raise WiringError(f"{sweeps[0]} describes a whole sweep. Give it alone, and add other recipes to it.")
        plan = read_sweep_file(sweeps[0])
    if seeds is not None:
        plan = replace(plan, seeds=seeds)
    grid = [parse_values(text) for text in change or []]
    keys = {values[0].partition("=")[0] for values in grid}
    kept = [values for values in plan.grid if values[0].partition("=")[0] not in keys]
    return replace(plan, grid=[*kept, *grid])


def split_seeds(what: Sequence[str], seed: Sequence[str] | None) -> tuple[list[str], list[int] | None]:
    """Recipes and seeds of a command line. Some write ``--seed 0 1 2``, and no recipe has a number as its name."""
    from wirings.train.sweep.plan import parse_seeds

    if not seed:
        return list(what), None
    numbers = [word for word in what if word.isdecimal()]
    return [word for word in what if not word.isdecimal()], parse_seeds([*seed, *numbers])


def executor_for(on: str, jobs: int | None, per_gpu: int | None, device: str | None) -> SweepExecutor:
    """What executes the runs: this machine, or a Ray cluster."""
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
