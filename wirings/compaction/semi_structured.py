"""Convert 2:4 weights to PyTorch's semi-structured tensors, where these are faster than dense ones.

A GPU with sparse tensor cores multiplies by a matrix with two zeros in every four entries in up to half the time, for
large products in half precision. For small products, the dense one is faster. So both are timed with the input that the
layer receives, and the faster one is kept.
"""

from __future__ import annotations

import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.utils.checks import check_int
from wirings.utils.example_input import example_arguments
from wirings.utils.layers import check_module
from wirings.wire.block_products.choose import MIN_SPEEDUP
from wirings.wire.parametrization import wired

CAPABILITY = (8, 0)
"""The compute capability of the first GPUs with 2:4 tensor cores."""
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class SemiStructuredLayer:
    """The timings of one linear layer, and whether its weight was converted."""

    name: str
    shape: tuple[int, ...]
    rows: int
    """Rows of the input in the timings: all examples and positions of the example input."""
    dense_us: float | None
    """Median time of the dense product in microseconds; None if it was not measured."""
    sparse_us: float | None
    used: bool
    """Whether the layer's weight is now a semi-structured tensor."""
    reason: str

    def __str__(self) -> str:
        times = "" if self.dense_us is None else f", dense {self.dense_us:.1f} µs, sparse {self.sparse_us:.1f} µs"
        kept = "semi-structured" if self.used else "dense"
        return f"{self.name} {'×'.join(map(str, self.shape))}, {self.rows} rows{times}: {kept} ({self.reason})"


def semi_structured_(model: nn.Module, example_input: Any, *, repeats: int = 30) -> list[SemiStructuredLayer]:
    """Convert the weights of linear layers to semi-structured tensors, in place, where that is faster.

    This is for inference, with a finalized model that was wired with ``structure="2:4"``, in half precision, on a CUDA
    device of compute capability 8.0 or more. Layers that are not 2:4, or not faster, are left as they are. Outputs are
    the same up to rounding. The model's ``state_dict`` can no longer be loaded into a plain model, and the
    converted weights can no longer be trained.

    Args:
        model: a plain model.
        example_input: a tensor, a tuple of inputs, a dict of keyword inputs, or the shape of one example. The timings
            depend on its batch size.
        repeats: timings of each product, of which the median is used.

    Returns:
        For each linear layer, its timings and why it was converted or not.
    """
    check_module("semi_structured_()", model)
    check_int("semi_structured_()", "repeats", repeats)
    if wired(model):
        raise WiringError(
            "semi_structured_ expects a finalized model, but this one is still wired. Call wirings.finalize_ first."
        )
    layers = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    if not layers:
        raise WiringError(f"{type(model).__name__} has no nn.Linear; only linear layers can be semi-structured.")
    device = layers[0][1].weight.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        got = torch.cuda.get_device_name(device) if device.type == "cuda" else f"a model on {device}"
        raise WiringError(
            "semi-structured tensors need a CUDA device with 2:4 tensor cores (compute capability 8.0 or more), got "
            f"{got}. The finalized model is the same network, and runs anywhere."
        )
    inputs = inputs_of(model, layers, example_input, "semi_structured_")
    users = users_of(model)
    return [_try(name, module, inputs.get(name), users[id(module.weight)] > 1, repeats) for name, module in layers]


def users_of(model: nn.Module) -> dict[int, int]:
    """How many modules have each parameter, by its id."""
    return Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))


def is_two_of_four(weight: Tensor) -> bool:
    """Whether at most two of every four neighbouring inputs of each node have a weight.

    >>> is_two_of_four(torch.tensor([[1.0, 0, 2.0, 0], [0, 0, 0, 3.0]]))
    True
    """
    if weight.dim() != 2 or weight.shape[1] % 4:
        return False
    return bool((weight.unflatten(1, (-1, 4)).count_nonzero(2) <= 2).all())


def inputs_of(
    model: nn.Module, layers: Sequence[tuple[str, nn.Module]], example_input: Any, where: str
) -> dict[str, Tensor]:
    """The input of each layer when the model is called; the last one if it is called several times."""
    arguments = example_arguments(model, example_input, where)
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        return lambda module, args, named: seen.update({name: (*args, *named.values())[0].detach()})

    hooks = [module.register_forward_pre_hook(note(name), with_kwargs=True) for name, module in layers]
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            model(*arguments.args, **arguments.kwargs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, was in training.items():
            module.training = was
    return seen


@torch.no_grad()
def _try(name: str, layer: nn.Linear, x: Tensor | None, shared: bool, repeats: int) -> SemiStructuredLayer:
    weight = layer.weight
    shape, rows = tuple(weight.shape), 0 if x is None else x.numel() // weight.shape[1]

    def left(reason: str, dense: float | None = None, sparse: float | None = None) -> SemiStructuredLayer:
        return SemiStructuredLayer(name, shape, rows, dense, sparse, False, reason)

    if x is None:
        return left("not called for the example input")
    if shared:
        return left("its weight is shared with another layer")
    compressed = compress(layer, x)
    if isinstance(compressed, str):
        return left(compressed)
    dense = _microseconds(lambda: nn.functional.linear(x, weight, layer.bias), repeats)
    sparse = _microseconds(lambda: nn.functional.linear(x, compressed, layer.bias), repeats)
    if dense < MIN_SPEEDUP * sparse:
        return left("the dense product is as fast", dense, sparse)
    layer.weight = nn.Parameter(compressed, requires_grad=False)
    return SemiStructuredLayer(name, shape, rows, dense, sparse, True, f"{dense / sparse:.2f} times as fast")


@torch.no_grad()
def compress(layer: nn.Linear, x: Tensor) -> Tensor | str:
    """The weight of a layer as a semi-structured tensor; or why that is impossible, or wrong for these inputs."""
    weight = layer.weight
    if weight.dtype not in HALF or x.dtype != weight.dtype:
        return f"its weight is {weight.dtype} and its input {x.dtype}; both must be float16 or bfloat16"
    if not is_two_of_four(weight):
        return "its weight is not 2:4"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # PyTorch warns that it is a prototype
            compressed = torch.sparse.to_sparse_semi_structured(weight.detach().contiguous())
            compute = nn.functional.linear(x, compressed, layer.bias)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"not supported by PyTorch: {str(error).splitlines()[0]}"
    expected = nn.functional.linear(x, weight, layer.bias)
    if not torch.allclose(
        compute.float(), expected.float(), rtol=2e-2, atol=2e-2 * float(expected.float().abs().amax())
    ):
        return "its outputs would differ by more than rounding"
    return compressed


def _microseconds(compute: Callable[[], Any], repeats: int) -> float:
    """The median time of ``compute`` on the GPU in microseconds, after a warm-up."""
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
