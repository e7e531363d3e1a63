"""One wired weight, as rules, reports and recorders see it."""

from dataclasses import dataclass

from torch import Tensor

from wirings.selection.shared import SelectedWeight
from wirings.utils.layers import receivers, senders
from wirings.wire.edges import Edges


@dataclass(frozen=True)
class Layer(SelectedWeight):
    """One wired weight: its name in the model, the module and attribute that hold it, and its edges."""

    edges: Edges

    def receivers(self) -> Tensor:
        """The node that each edge leads to: int32 numbers from 0, of a shape that broadcasts to the weight's."""
        return receivers(self.module, self.attribute, self.weight).to(self.weight.device)

    def senders(self) -> Tensor:
        """The node of a neural graph that each edge leaves: int32 numbers of the weight's shape."""
        return senders(self.module).to(self.weight.device)
