"""`speed_up_`: the fastest kernels for the linear layers of a sparse model on this GPU, by measurement."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wirings.compaction.fused_activations import fusable_activations, has_hooks
from wirings.compaction.same_outputs import difference
from wirings.compaction.semi_structured import compress, inputs_of, is_two_of_four, users_of
from wirings.errors import WiringError
from wirings.utils.example_input import CallArguments, call_error, example_arguments
from wirings.utils.layers import check_module
from wirings.utils.tables import text_table
from wirings.wire.block_products.choose import MIN_SPEEDUP, known, milliseconds
from wirings.wire.block_products.layout import BLOCKS, nonzero_blocks
from wirings.wire.block_products.linear import BlockLinear
from wirings.wire.parametrization import wired

DEVICE = "cuda"
"""The devices that this is for."""
MAX_DENSITY = 0.7
"""Layers with more of their blocks are not worth a measurement."""
_FULLER = 1.1  # how much more of larger blocks may exist than of the smallest, for these to be what a layer consists of


@dataclass(frozen=True)
class FasterLayer:
    """What `speed_up_` chose for one linear layer."""

    name: str
    shape: tuple[int, ...]
    tokens: int
    """Rows of the input in the timings: all examples and positions of the example input."""
    chosen: str
    """``"dense"``, ``"2:4"`` or the blocks, such as ``"32x32"``; with ``" + GELU"`` if that is computed with it."""
    dense_ms: float | None
    """Milliseconds of the dense layer, and of its GELU if that is computed with it; None if it was not measured."""
    chosen_ms: float | None
    reason: str


@dataclass(frozen=True)
class SpeedUp:
    """What `speed_up_` did. Print it for a table."""

    layers: list[FasterLayer] = field(default_factory=list)
    before_ms: float | None = None
    """Milliseconds of the whole model, called; None if nothing was measured."""
    after_ms: float | None = None
    note: str = ""

    @property
    def gain(self) -> float:
        """How many times as fast the whole model is now."""
        return 1.0 if not self.before_ms or not self.after_ms else self.before_ms / self.after_ms

    def __str__(self) -> str:
        rows = [
            [x.name, "×".join(map(str, x.shape)), f"{x.tokens:,}", x.chosen, _shown(x.dense_ms), _shown(x.chosen_ms),
             x.reason]
            for x in self.layers
        ]  # fmt: skip
        head = ["layer", "weight", "tokens", "chosen", "dense ms", "ms", ""]
        text = "\n".join(text_table(head, rows, align="llrlrrl")) if rows else ""
        if self.before_ms is not None and self.after_ms is not None:
            times = f"{self.before_ms:.3f} ms before, {self.after_ms:.3f} ms now"
            text += f"\nmodel, called: {times}, {self.gain:.2f} times as fast"
        return f"{text}\n{self.note}".strip()


def speed_up_(model: nn.Module, example_input: Any) -> SpeedUp:
    """Replace the linear layers of a sparse model, in place, by those that are fastest on this GPU.

    For inference with a plain model that has zeros, such as `wirings.finalize_` returns. Each linear layer is measured
    with the inputs that it receives: dense, as PyTorch's semi-structured tensor if it is 2:4, and with kernels that
    skip zero blocks if it consists of square blocks of 16, 32, 64 or 128, which its zeros show. An ``nn.GELU`` that
    follows a layer in blocks in an ``nn.Sequential``, and is used nowhere else, is computed with it; so are those of
    the package's GPT and ViT. What is not faster is left unchanged, and so is the whole model if it was no faster in
    the end. Outputs are the same up to rounding. Blocks need half precision: that of the model, or autocast around this
    call.

    Layers in blocks keep the names of their parameters. If a layer becomes 2:4, the model's ``state_dict`` can no
    longer be loaded into a plain model, and the layer's weight has ``requires_grad=False``: it cannot be trained
    further. Weights must not change afterwards in models that are compiled or captured as CUDA graphs, which would
    ignore new blocks. Elsewhere, layers in blocks notice changes in place, except those through ``weight.data``.

    Linear layers of a wired model choose their kernels by themselves, and stay wired. On a CPU nothing is changed:
    there `wirings.engine` runs sparse models fast.

    Args:
        model: a model on a CUDA device. Compile it afterwards, if at all.
        example_input: a tensor, a tuple of inputs, a dict of keyword inputs, or the shape of one example. The timings
            depend on its batch size.

    Returns:
        What was chosen and gained for each layer, and for the model. Print it for a table.
    """
    check_module("speed_up_()", model)
    arguments = example_arguments(model, example_input, "speed_up_")
    layers = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    if not layers and not wired(model):
        raise WiringError(f"{type(model).__name__} has no nn.Linear; speed_up_ replaces linear layers only.")
    call = _calling(model, arguments)
    with _evaluating(model):
        try:
            call()
        except WiringError:
            raise
        except Exception as error:
            raise call_error(model, example_input, arguments, error, "speed_up_") from error
    device = next(model.parameters()).device
    if device.type != DEVICE:
        return SpeedUp(
            note=f"The model is on {device}, and unchanged: speed_up_ is for CUDA devices. On a CPU, "
            "wirings.engine.compile(model, example_input) runs sparse models fast."
        )
    if wired(model):
        return _of_wired(model, example_input, call)
    with _evaluating(model):
        inputs = inputs_of(model, layers, example_input, "speed_up_")
        after = fusable_activations(model, call)
        expected, before_ms = call(), milliseconds(call)
        users, changes, found = users_of(model), _Changes(model), []
        try:
            for name, layer in layers:
                shared = users[id(layer.weight)] > 1
                found.append(_choose(name, layer, inputs.pop(name, None), after.get(layer), shared, changes))
            if not changes.made:
                return SpeedUp(found, before_ms, before_ms, "No layer is faster with other kernels.")
            why = difference(call(), expected)
            after_ms = before_ms if why else milliseconds(call)
        except BaseException:  # such as no memory
            changes.undo()
            raise
        slower = not why and after_ms > before_ms
        if slower:
            why = f"it would take {after_ms:.3f} ms instead of {before_ms:.3f} ms"
        if why:
            changes.undo()
            reason = "the model as a whole was no faster" if slower else why
            found = [x if x.chosen == "dense" else replace(x, chosen="dense", reason=reason) for x in found]
            return SpeedUp(found, before_ms, before_ms, f"The model is unchanged: {why}.")
    return SpeedUp(found, before_ms, after_ms)


def _of_wired(model: nn.Module, example_input: Any, call: Callable[[], Any]) -> SpeedUp:
    """What the layers of a wired model have chosen by themselves."""
    layers = [
        (name.removesuffix(".weight"), m, edges) for name, m, _, edges in wired(model) if isinstance(m, nn.Linear)
    ]
    with _evaluating(model):
        inputs = inputs_of(model, [(name, module) for name, module, _ in layers], example_input, "speed_up_")
        after_ms = milliseconds(call)
    found = []
    for name, module, edges in layers:
        (outputs, width), x, plan = module.weight.shape, inputs.get(name), edges.blocks
        tokens = 0 if x is None else x.numel() // width
        choice = None
        if x is not None and plan is not None:
            kind = x.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
            choice = known("forward none", x.device, dtype, (tokens, outputs, width, plan.block), plan.density)
        if choice is None or plan is None:
            why = (
                "not in square blocks of 16 to 128, in a fixed number" if plan is None else "no kernels for its inputs"
            )
            found.append(FasterLayer(name, (outputs, width), tokens, "dense", None, None, why))
            continue
        side, gain = f"{plan.block}x{plan.block}", choice.dense_ms / choice.tile_ms
        reason = f"{side} is no faster" if choice.tile is None else f"{gain:.2f} times as fast"
        chosen = "dense" if choice.tile is None else side
        found.append(FasterLayer(name, (outputs, width), tokens, chosen, choice.dense_ms, choice.tile_ms, reason))
    note = (
        "The model is wired, and unchanged: its layers in blocks choose their kernels by themselves. Call "
        "wirings.finalize_ first to fuse them with their activations, and for 2:4."
    )
    return SpeedUp(found, after_ms, after_ms, note)


def _choose(
    name: str, layer: nn.Linear, x: Tensor | None, activation: nn.GELU | None, shared: bool, changes: _Changes
) -> FasterLayer:
    """Measure the ways to compute one layer, and replace it if another one is faster."""
    shape = tuple(layer.weight.shape)
    tokens = 0 if x is None else x.numel() // shape[1]

    def report(chosen: str, dense: float | None, ms: float | None, reason: str) -> FasterLayer:
        return FasterLayer(name, shape, tokens, chosen, dense, ms, reason)

    if x is None:
        return report("dense", None, None, "not called for the example input")
    if has_hooks(layer) or "weight" not in layer._parameters:
        return report("dense", None, None, "has hooks or a weight that is computed")
    ways: dict[str, tuple[Callable[[], Any], Callable[[], None]]] = {}
    fused, why = "", "has no blocks of zeros and is not 2:4"
    if (side := block_side(layer.weight)) is not None:
        kind = None if activation is None else "gelu_tanh" if activation.approximate == "tanh" else "gelu"
        fused = "" if kind is None else " + GELU"
        module = BlockLinear(layer, side, kind).train(layer.training)

        def insert() -> None:
            changes.module(layer, module)
            if activation is not None:
                changes.module(activation, nn.Identity())

        ways[f"{side}x{side}{fused}"] = (lambda: module(x), insert)
    if is_two_of_four(layer.weight) and not shared:
        compressed = compress(layer, x)
        if isinstance(compressed, str):
            why = compressed
        else:
            ways["2:4"] = (lambda: F.linear(x, compressed, layer.bias), lambda: changes.weight(layer, compressed))
    if not ways:
        return report("dense", None, None, why)
    dense = milliseconds(lambda: layer(x))
    gelu = 0.0
    if activation is not None:
        before = layer(x)
        gelu = milliseconds(lambda: activation(before))
    # What a way takes in place of the dense layer and its activation.
    times = {way: milliseconds(run) + (0.0 if "GELU" in way else gelu) for way, (run, _) in ways.items()}
    best = min(times, key=times.__getitem__)
    if dense + gelu < MIN_SPEEDUP * times[best]:
        return report("dense", dense + gelu, times[best], f"{best} is no faster")
    ways[best][1]()
    return report(best, dense + gelu, times[best], f"{(dense + gelu) / times[best]:.2f} times as fast")


def block_side(weight: Tensor) -> int | None:
    """The side of the largest blocks that a weight consists of, if some are zero and there are kernels for them.

    >>> weight = torch.zeros(64, 64)
    >>> weight[:32, 32:] = 1
    >>> block_side(weight)
    32
    """
    sides = [side for side in BLOCKS if not any(size % side for size in weight.shape)]
    densities = {side: float(nonzero_blocks(weight, side).float().mean()) for side in sides}
    if not densities or not 0 < densities[sides[0]] <= MAX_DENSITY:
        return None
    return max(side for side in sides if densities[side] <= _FULLER * densities[sides[0]])


class _Changes:
    """Replacements in a model, which can be undone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.made: list[Callable[[], None]] = []

    def module(self, old: nn.Module, new: nn.Module) -> None:
        for parent in list(self.model.modules()):
            for name, child in parent._modules.items():
                if child is old:
                    parent._modules[name] = new
                    self.made.append(functools.partial(parent._modules.__setitem__, name, old))

    def weight(self, layer: nn.Linear, compressed: Tensor) -> None:
        old = layer.weight
        layer.weight = nn.Parameter(compressed, requires_grad=False)
        self.made.append(lambda: setattr(layer, "weight", old))

    def undo(self) -> None:
        for one in reversed(self.made):
            one()


def _calling(model: nn.Module, arguments: CallArguments) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return model(*arguments.args, **arguments.kwargs)

    return call


class _evaluating:  # noqa: N801 - used as a function
    """Set a model to evaluation, and back."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.training = {module: module.training for module in model.modules()}

    def __enter__(self) -> None:
        self.model.eval()

    def __exit__(self, *_: object) -> None:
        for module in self.model.modules():
            module.training = self.training.get(module, self.training[self.model])


def _shown(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.4f}"
