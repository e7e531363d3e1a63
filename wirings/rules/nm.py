"""N:M wiring: of every m edges that lead to a node, n are real."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.rules.registry import register
from wirings.rules.rule import EdgesLike, LayerLike, Rule
from wirings.selection import functional, sharded
from wirings.selection.cpu import keys_of
from wirings.utils.checks import check_int


@register
class NM(Rule):
    """In every group of m neighbouring inputs, the n edges of largest magnitude are real; the rest get a gradient too.

    It is `DNW` within groups, as in Zhou et al. ("Learning N:M Fine-grained Structured Sparse Neural Networks From
    Scratch", ICLR 2021); they add a decay of hallucinated weights, which this rule does not have, and reach 77.0 % on
    ImageNet with ResNet50 in 2:4. Groups lie along the input dimension: m consecutive inputs of a linear layer or of an
    expert, or m input channels at one position of a convolution's kernel. GPUs multiply 2:4 matrices of some shapes
    faster than dense ones: `wirings.semi_structured_` measures which.

    Args:
        n: the number of real edges in a group.
        m: the size of a group; must divide the number of inputs (of one group, in a grouped convolution).
    """

    name = "nm"
    reaches = "all"
    own_budget = True
    layers_only = True
    acts_between_steps = False

    def __init__(self, n: int = 2, m: int = 4) -> None:
        self.n, self.m = check_int(self.name, "n", n), check_int(self.name, "m", m)
        if n > m:
            raise WiringError(f"{self.name}: n must be at most m, got n = {n} and m = {m}.")

    def budget(self, allowed: int, shape: tuple[int, ...]) -> int:
        return allowed // self.m * self.n

    def setup(self, layers: Sequence[LayerLike]) -> None:
        for layer in layers:
            weight, what = layer.weight, f"rule {self.name!r} keeps {self.n} of every {self.m} inputs of a node"
            remedy = f"Leave the layer dense: skip=[{layer.name!r}]."
            dim = layer.edges.inputs
            if weight.dim() < 2 or dim == 0 or layer.receivers().shape[dim] > 1:
                raise WiringError(
                    f"{what}, and so needs a weight with a row for every node and its inputs in dimension 1, but "
                    f"{layer.name} has shape {tuple(weight.shape)} in a {type(layer.module).__name__}. {remedy}"
                )
            if weight.shape[dim] % self.m:
                raise WiringError(
                    f"{what}, but {layer.name} of shape {tuple(weight.shape)} has {weight.shape[dim]} inputs, which is "
                    f"not a multiple of {self.m}. {remedy}"
                )
            if layer.edges.allowed is not None:
                raise WiringError(
                    f"{what}, but allowed= excludes edges of {layer.name}, so some groups would have fewer. Drop "
                    f"allowed=, or use skip=[{layer.name!r}]."
                )

    def real(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        dim = edges.inputs
        return sharded.by_rows(lambda rows: strongest_of_groups(rows, self.n, self.m, dim), weight.detach())

    def forward(self, weight: Tensor, edges: EdgesLike) -> Tensor:
        return functional.straight_through(weight, self.real(weight, edges))


def strongest_of_groups(weight: Tensor, n: int, m: int, dim: int = 1) -> Tensor:
    """A mask of the ``n`` entries of largest magnitude among every ``m`` along ``dim``; ties go to the earlier.

    >>> strongest_of_groups(torch.tensor([[4.0, -1.0, 3.0, 2.0], [1.0, 1.0, 1.0, 1.0]]), 2, 4)
    tensor([[ True, False,  True, False],
            [ True,  True, False, False]])
    """
    keys = keys_of(weight.contiguous(), None).movedim(dim, -1).unflatten(-1, (-1, m))
    if weight.device.type == "cpu":  # sorting is faster there than comparing all pairs: ten times for 3:32
        order = keys.argsort(dim=-1, descending=True, stable=True)
        grouped = torch.zeros_like(keys, dtype=torch.bool).scatter(-1, order[..., :n], True)
    else:
        mine, other = keys.unsqueeze(-1), keys.unsqueeze(-2)
        places = torch.arange(m, device=weight.device)
        ahead = (other > mine) | ((other == mine) & (places < places.unsqueeze(-1)))
        grouped = ahead.sum(-1) < n
    real = grouped.flatten(-2).movedim(-1, dim)
    return torch.empty_like(weight, dtype=torch.bool).copy_(real)  # in the weight's own memory format
