"""2:4 weights as PyTorch's semi-structured tensors, where these are faster than dense ones on the user's own shapes.

A GPU with sparse tensor cores multiplies by a matrix of which two of every four entries are zero in up to half the
time, for large products in half precision. For small ones the dense product is faster. So both are timed here, with the
input that the layer gets, and the faster one stays.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.wire.parametrization import wired

CAPABILITY = (8, 0)
"""Of the first GPUs with 2:4 tensor cores."""
GAIN = 1.02
"""How much faster the sparse product must be: more than the spread of the timings."""
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Measured:
    """What was found for one linear layer."""

    name: str
    shape: tuple[int, ...]
    rows: int
    """That it was measured with: all examples and positions of the example input."""
    dense_us: float | None
    """Median time of the dense product, in microseconds; None where there was nothing to measure."""
    sparse_us: float | None
    used: bool
    """Whether the layer's weight is a semi-structured tensor now."""
    reason: str

    def __str__(self) -> str:
        times = "" if self.dense_us is None else f", dense {self.dense_us:.1f} µs, sparse {self.sparse_us:.1f} µs"
        kept = "semi-structured" if self.used else "dense"
        return f"{self.name} {'×'.join(map(str, self.shape))}, {self.rows} rows{times}: {kept} ({self.reason})"


def semi_structured_(model: nn.Module, example_input: Any, *, repeats: int = 30) -> list[Measured]:
    """Turn the weights of linear layers into semi-structured tensors, in place, where that is faster.

    For inference, with a finalized model that was wired with the rule `nm` in 2:4, in half precision, on a CUDA device
    of compute capability 8.0 or more. Layers that are not 2:4, or not faster so, are left as they are; what comes back
    says why. Outputs are the same but for rounding. The model's ``state_dict`` can no longer be loaded into a plain
    one.

    Args:
        model: a plain model, in evaluation.
        example_input: what it is called with, a tensor or a tuple of arguments; the batch matters.
        repeats: timings of each product, of which the median counts.
    """
    if wired(model):
        raise WiringError(
            "the model is wired still, and its weights change with every step; call wirings.finalize_ first."
        )
    layers = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    if not layers:
        raise WiringError(f"{type(model).__name__} has no nn.Linear, and only these can be semi-structured.")
    place = layers[0][1].weight.device
    if place.type != "cuda" or torch.cuda.get_device_capability(place) < CAPABILITY:
        kind = f"{torch.cuda.get_device_name(place)} has none" if place.type == "cuda" else f"the model lies on {place}"
        raise WiringError(
            "semi-structured tensors need a CUDA device with 2:4 tensor cores (compute capability 8.0 or more), but "
            f"{kind}. The finalized model is the same network, and runs anywhere."
        )
    inputs = _inputs(model, layers, example_input)
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    return [_try(name, module, inputs.get(name), users[id(module.weight)] > 1, repeats) for name, module in layers]


def is_two_of_four(weight: Tensor) -> bool:
    """Whether at most two of every four neighbouring inputs of each node have a weight.

    >>> is_two_of_four(torch.tensor([[1.0, 0, 2.0, 0], [0, 0, 0, 3.0]]))
    True
    """
    if weight.dim() != 2 or weight.shape[1] % 4:
        return False
    return bool((weight.unflatten(1, (-1, 4)).count_nonzero(2) <= 2).all())


def _inputs(model: nn.Module, layers: list[tuple[str, nn.Linear]], example_input: Any) -> dict[str, Tensor]:
    """What each layer gets when the model is called: the last input, if it is called several times."""
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        return lambda module, args, named: seen.update({name: (*args, *named.values())[0].detach()})

    hooks = [module.register_forward_pre_hook(note(name), with_kwargs=True) for name, module in layers]
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            model(*(example_input if type(example_input) is tuple else (example_input,)))
    finally:
        for hook in hooks:
            hook.remove()
        for module, was in training.items():
            module.training = was
    return seen


@torch.no_grad()
def _try(name: str, layer: nn.Linear, x: Tensor | None, shared: bool, repeats: int) -> Measured:
    weight = layer.weight
    shape, rows = tuple(weight.shape), 0 if x is None else x.numel() // weight.shape[1]

    def left(reason: str, dense: float | None = None, sparse: float | None = None) -> Measured:
        return Measured(name, shape, rows, dense, sparse, False, reason)

    if x is None:
        return left("it was not called with the example input")
    if shared:
        return left("another layer shares its weight")
    if weight.dtype not in HALF or x.dtype != weight.dtype:
        return left(f"its weight is {weight.dtype} and its input {x.dtype}; both must be float16 or bfloat16")
    if not is_two_of_four(weight):
        return left("its weight is not 2:4")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # PyTorch calls it a prototype
            compressed = torch.sparse.to_sparse_semi_structured(weight.detach().contiguous())
            compute = nn.functional.linear(x, compressed, layer.bias)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return left(f"PyTorch does not take it: {str(error).splitlines()[0]}")
    expected = nn.functional.linear(x, weight, layer.bias)
    if not torch.allclose(
        compute.float(), expected.float(), rtol=2e-2, atol=2e-2 * float(expected.float().abs().amax())
    ):
        return left("its outputs would differ by more than rounding")
    dense = _microseconds(lambda: nn.functional.linear(x, weight, layer.bias), repeats)
    sparse = _microseconds(lambda: nn.functional.linear(x, compressed, layer.bias), repeats)
    if dense < GAIN * sparse:
        return left("the dense product is as fast", dense, sparse)
    layer.weight = nn.Parameter(compressed, requires_grad=False)
    return Measured(name, shape, rows, dense, sparse, True, f"{dense / sparse:.2f} times as fast")


def _microseconds(compute: Callable[[], Any], repeats: int) -> float:
    """The median time of ``compute`` on the GPU, after a warm-up."""
    for _ in range(5):
        compute()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        compute()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    return statistics.median(times)
