"""Rules that follow a schedule over the whole training, and so must know how long it is."""

import math

from wirings.errors import WiringError
from wirings.rules.rule import Rule, Training
from wirings.utils.checks import check_int


class Planned(Rule):
    """A rule with a schedule over training.

    Args:
        steps: the number of optimizer steps of the whole training, for loops that do not call `Wiring.plan`.
    """

    def __init__(self, steps: int | None = None) -> None:
        self.steps = None if steps is None else check_int(self.name, "steps", steps)

    def length(self, training: Training) -> int:
        """The number of optimizer steps of the whole training."""
        steps = training.steps if self.steps is None else self.steps
        if steps is None:
            raise WiringError(
                f"rule {self.name!r} follows a schedule and does not know how long the training is: call "
                "wiring.plan(steps) with the number of optimizer steps before training, or give the rule steps=."
            )
        return steps

    def length_before(self, training: Training) -> int | None:
        """The value of `length` at the last update; None at the first. Changing the plan may skip a step."""
        return training.steps_before if self.steps is None else self.steps


class Periodic(Planned):
    """A rule that changes the wiring at regular intervals.

    Args:
        every: optimizer steps from one change to the next; None for a hundredth of training.
        steps: the number of optimizer steps of the whole training; by default that of `Wiring.plan`.
    """

    end: float = 1.0
    """The fraction of training after which the wiring no longer changes."""

    def __init__(self, every: int | None, steps: int | None) -> None:
        super().__init__(steps)
        self.every = None if every is None else check_int(self.name, "every", every)

    def period(self, steps: int) -> int:
        """Optimizer steps from one change to the next, in a training of ``steps``."""
        return max(steps // 100, 1) if self.every is None else self.every

    def due(self, step: int, steps: int) -> bool:
        """Whether the wiring changes after optimizer step ``step`` of ``steps``."""
        return step % self.period(steps) == 0 and step < self.end * steps

    def idle(self, steps: int | None) -> str | None:
        steps = steps if self.steps is None else self.steps
        if steps is None or not self.end or self.due(self.period(steps), steps):
            return None
        last = math.ceil(self.end * steps) - 1
        period = self.period(steps)
        often = "every step" if period == 1 else f"every {period} steps"
        advice = "use a smaller every=" if last >= 1 else "train longer"
        return f"it changes the wiring {often}, up to step {last}; {advice}"
