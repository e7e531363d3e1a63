"""The one-shot lottery ticket (Frankle and Carbin, 2019; section 3.3 of the paper)."""

from wirings.rules.fine_tune import FineTune
from wirings.rules.registry import register


@register
class Lottery(FineTune):
    """The wiring of `FineTune`; training then restarts from the network's initial weights.

    A rule sees edges only. Everything else that was trained (biases, norms and their statistics) is restored by
    `wirings.rewind_`, for the whole model:

        initial = copy.deepcopy(model.state_dict())
        train(model)
        wiring = wirings.wire_(model, "lottery", density=0.1)
        wirings.rewind_(model, initial)
        train(model)
    """

    name = "lottery"
