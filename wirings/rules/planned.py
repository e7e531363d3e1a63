"""What rules share that follow a schedule over the whole training, and so must know how long that is."""

from collections.abc import Sequence

from wirings.errors import WiringError
from wirings.rules.base import Layer, Rule
from wirings.utils.checks import whole_number


class Planned(Rule):
    """A rule with a schedule. Its length comes from ``steps=``, or else from `Wiring.plan`.

    Args:
        steps: optimizer steps of the whole training, for a loop of your own that does not call `Wiring.plan`.
    """

    def __init__(self, steps: int | None = None) -> None:
        self.steps = None if steps is None else whole_number(self.name, "steps", steps)

    def plan(self, layers: Sequence[Layer], steps: int) -> None:
        for layer in layers:
            layer.edges.planned, layer.edges.replanned = steps, True

    def length(self, layers: Sequence[Layer]) -> int:
        """How many steps the training has."""
        steps = layers[0].edges.planned if self.steps is None else self.steps
        if steps is None:
            raise WiringError(
                f"rule {self.name!r} follows a schedule and was not told how long the training is: call "
                "wiring.plan(steps) with the number of optimizer steps before it, or give the rule steps=."
            )
        return steps

    def replanned(self, layers: Sequence[Layer]) -> bool:
        """Whether the length was said since this was asked last: a step that was to come may have been passed over."""
        told = any(layer.edges.replanned for layer in layers)
        for layer in layers:
            layer.edges.replanned = False
        return told
