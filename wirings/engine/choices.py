"""What can be chosen for an engine: its kind, its threads, and how each step is computed; in a file, too."""

from __future__ import annotations

from typing import Any

from wirings.engine.execution_plan import ExecutionPlan
from wirings.engine.step import StepChoice
from wirings.errors import WiringError, unknown
from wirings.utils.checks import is_int

ENGINES = ("auto", "sparse", "dense", "torch")
MAX_THREADS = 1024
"""More than any machine has cores. Each thread takes memory of its own."""


def check_settings(engine: Any, threads: Any) -> None:
    """Raise unless ``engine`` is one of `ENGINES`, and ``threads`` is None or a positive integer."""
    if not isinstance(engine, str) or engine not in ENGINES:
        raise unknown("engine", str(engine)[:60], ENGINES)
    if threads is not None and (not is_int(threads) or threads < 1):
        raise WiringError(f"threads must be a positive integer, got {threads!r}.")
    if threads is not None and threads > MAX_THREADS:
        raise WiringError(f"threads must be at most {MAX_THREADS:,}, got {threads:,}.")


def check_choices(saved: Any) -> None:
    """Raise unless what a file says about its engine has the form of `EngineModel.choices`."""
    optional = {"on_torch", "int8"}
    if not isinstance(saved, dict) or set(saved) - optional != {"engine", "threads", "processor", "steps"}:
        raise WiringError("expected an engine, its threads, its processor and its steps")
    if not isinstance(saved.get("on_torch", False), bool):
        raise WiringError("expected whether the network runs on PyTorch")
    check_settings(saved["engine"], saved["threads"])
    steps = saved["steps"]
    plans = steps if isinstance(steps, list) and all(isinstance(plan, list) for plan in steps) else [[None]]
    for choice in (choice for plan in plans for choice in plan):
        if not (isinstance(choice, list) and [type(part) for part in choice] == [str, int]):
            raise WiringError("expected a way and a number of strips for each step")


def is_valid_choice(saved: Any, plans: list[ExecutionPlan]) -> bool:
    """Whether the choices in a file are among those that would be measured here. The kernels do not check them."""
    if [len(choices) for choices in saved] != [len(plan.steps) for plan in plans]:
        return False
    return all(
        StepChoice(*choice) in plan.choices_of(step)
        for choices, plan in zip(saved, plans, strict=True)
        for choice, step in zip(choices, plan.steps, strict=True)
    )
