"""``wirings sweep``: parses, calls, prints."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from wirings.errors import WiringError, unknown

PLACES = ("local", "ray")


def sweep(
    what: Annotated[
        list[str],
        typer.Argument(help="Recipes, patterns of them ('ste/*-2') or YAML files; or one YAML file of a sweep."),
    ],
    out: Annotated[Path, typer.Option(help="The sweep's folder; the same line again goes on there.")],
    seed: Annotated[list[str] | None, typer.Option(help="Such as 0,1,2 or 0-4; by default 0.")] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting and its values, such as optimizer.lr=0.1,0.05: every combination."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs at a time; by default one a GPU, or one for 2 cores.")] = None,
    per_gpu: Annotated[int, typer.Option(help="Runs that share a GPU.")] = 1,
    on: Annotated[str, typer.Option(help="Where: this machine (local), or a Ray cluster (ray).")] = "local",
    data: Annotated[Path | None, typer.Option(help="The folder with the data, for runs that read files.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default a GPU where there is one.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="Keep results of runs without changed settings in this folder, too.")
    ] = None,
    retries: Annotated[int, typer.Option(help="How often a run that was killed goes on.")] = 3,
    max_minutes: Annotated[float | None, typer.Option(help="Stop at checkpoints after so long.")] = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="Only list the runs.")] = False,
) -> None:
    """Train many runs: wirings sweep table2/dnw table2/random --seed 0,1,2 --out sweeps/first."""
    from wirings.train.distributed import device_type
    from wirings.train.sweep import folder, plan, schedule, show, work
    from wirings.utils.files import check_folder
    from wirings.utils.locks import held

    runs = plan.make(**_asked(what, seed, change))
    for name, number, least in (("--jobs", jobs, 1), ("--per-gpu", per_gpu, 1), ("--retries", retries, 0)):
        if number is not None and number < least:
            raise WiringError(f"{name} must be at least {least}, but it is {number}.")
    if max_minutes is not None and not max_minutes > 0:
        raise WiringError(f"--max-minutes must be a number of minutes above 0, not {max_minutes:g}.")
    device_type(device)
    if on not in PLACES:
        raise unknown("place for runs (--on)", on, PLACES)
    if data is not None and not any(map(work.reads_files, runs)):
        raise WiringError(f"none of these runs reads files; leave --data out (it is {data}).")
    if dry:
        for run in runs:
            typer.echo(f"{run.place}" + (f" (starts from {run.start.place})" if run.start is not None else ""))
        return
    folder.check(out, runs)
    if results is not None:
        check_folder(results, "--results")
    executor = _executor(on, jobs, per_gpu, device)  # before anything is written: Ray may be missing
    try:
        with held(out, typer.echo), show.Shown() as shown, _terminated_is_interrupted():
            folder.enter(out, runs)
            shown.say(f"{len(runs)} runs, {executor}; see {out}")
            states: list[schedule.State] = []
            try:
                given = {"data": None if data is None else data.resolve(), "device": device}
                states = schedule.sweep(runs, out, executor, shown, retries=retries, max_minutes=max_minutes, **given)
            except KeyboardInterrupt:
                if results is not None:
                    _keep(runs, out, results, shown)
                done = sum(folder.finished(out / run.place) for run in runs)
                shown.say(f"stopped: {done} of {len(runs)} runs are finished. The same line goes on with the others.")
                raise typer.Exit(130) from None
        shown.console.print(show.results(schedule.summary(states)))
        if results is not None:
            _keep(runs, out, results, shown)
    finally:
        executor.stop()
    failed = [state for state in states if state.status == schedule.FAILED]
    for state in failed:
        shown.say(f"\n{state.run.place} has failed: {state.reason}")
    left = sum(state.status != schedule.FINISHED for state in states)
    if failed or left:
        shown.say(
            f"\n{left} of {len(runs)} runs are not finished, {len(failed)} of them failed. The same line goes on."
        )
        raise typer.Exit(1)


def _asked(what: list[str], seed: list[str] | None, change: list[str] | None) -> dict[str, Any]:
    """What `wirings.train.sweep.plan.make` is to be called with: a file's words, where there is one, and the line's."""
    from wirings.train.sweep import plan

    if seed:  # --seed 0 1 2, as some write it: no recipe is called by a number
        seed = seed + [word for word in what if word.isdecimal()]
        what = [word for word in what if not word.isdecimal()]
    found: dict[str, Any] = {"names": what, "seeds": [0], "grid": [], "variants": []}
    files = [Path(word) for word in what if word.endswith((".yaml", ".yml"))]
    sweeps = [path for path in files if plan.is_sweep(path)]
    if sweeps:
        if len(what) > 1:
            raise WiringError(f"{sweeps[0]} describes a whole sweep: give it alone, and other recipes in it.")
        found = plan.read(sweeps[0])
        found["seeds"] = found["seeds"] or [0]
    if seed:
        found["seeds"] = plan.seeds_of(seed)
    grid = [plan.values_of(text) for text in change or []]
    keys = {values[0].partition("=")[0] for values in grid}
    found["grid"] = [values for values in found["grid"] if values[0].partition("=")[0] not in keys] + grid
    return found


def _executor(on: str, jobs: int | None, per_gpu: int, device: str | None) -> Any:
    if on == "ray":
        from wirings.train.sweep.on_ray import OnRay

        return OnRay(jobs, per_gpu, device)
    from wirings.train.sweep.local import Local

    return Local(jobs, per_gpu, device)


class _terminated_is_interrupted:  # noqa: N801 - it is used as a function
    """SIGTERM ends a sweep as Ctrl-C does, so that no run goes on without it."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTERM, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)


def _keep(runs: Any, out: Path, results: Path, shown: Any) -> None:
    """Copy the results of finished runs that are a recipe as it is, where there is none yet."""
    from wirings.train.results import path_of, read, write
    from wirings.train.run.folder import RESULT
    from wirings.train.sweep.folder import finished

    for run in runs:
        if not run.wanted or not finished(out / run.place):
            continue
        own = out / run.place / RESULT
        result = read(own)
        path = path_of(results, result.recipe, result.seed)
        if result.overrides:
            continue
        if not path.exists():
            shown.say(f"wrote {write(result, results)}")
        elif path.read_bytes() != own.read_bytes():
            shown.say(f"{path} holds another result already and was left as it is")
