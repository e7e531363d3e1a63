"""The one-shot lottery ticket (Frankle and Carbin, 2019; the paper's section 3.3)."""

from wirings.rules.base import register
from wirings.rules.fine_tune import FineTune


@register
class Lottery(FineTune):
    """The wiring of `FineTune`; the difference is in what training then starts from: the network's first weights.

    A rule sees edges alone, so all else that was trained (biases, norms and their statistics) is not its to bring back:
    `wirings.rewind_` does that for the whole model.

        initial = copy.deepcopy(model.state_dict())
        train(model)
        wiring = wirings.wire_(model, "lottery", density=0.1)
        wirings.rewind_(model, initial)
        train(model)
    """

    name = "lottery"
