"""`prune_` a trained model by what its edges carry on a few batches: a calibrated start for any rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wirings.budgets.schedules import check_density, floor_of
from wirings.errors import WiringError, unknown
from wirings.selection import functional
from wirings.selection.sharded import is_sharded
from wirings.utils.layers import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS, is_transposed_linear, receivers
from wirings.utils.text import brief
from wirings.wire.checks import check_not_wrapped, check_patterns, check_wirable
from wirings.wire.targets import Target, find

BY = ("node", "layer")
_TRANSPOSED = {
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}


def prune_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    density: float,
    by: str = "node",
    include: Sequence[str] | None = None,
    skip: Sequence[str] = (),
) -> nn.Module:
    """Set the edges of a trained model that carry the least to zero, in place, judged on a few batches.

    An edge's score is the magnitude of its weight times the norm ‖x‖ of the values that it multiplies, over all batches
    (Wanda: Sun, Liu, Bair and Kolter, "A Simple and Effective Pruning Approach for Large Language Models", ICLR 2024).
    The result is a plain model with zeros. To train it further, wire it: ``wire_(model, "keep")`` keeps these zeros,
    and ``wire_(model, rule, start="weights")`` lets another rule change the wiring from there. The model runs in
    evaluation mode and without gradients; of the batches only the norms are kept, until the function returns.

    Args:
        model: a plain model with linear layers, convolutions (also transposed and grouped) or GPT-2's ``Conv1D``.
        batches: what to run the model on, such as some batches of a ``DataLoader``. Each is a tensor, a mapping of
            keyword arguments, or a tuple or list whose first entry is one of these (inputs and labels). Tensors are
            moved to the model's device.
        density: the fraction of edges that stay, in (0, 1], rounded down to a whole number, at least one.
        by: where edges compete: ``"node"`` for the incoming edges of every output node, which all keep equally many (as
            in the paper), or ``"layer"`` for all edges of a layer.
        include: patterns of the layers to prune, as for `wirings.wire_`.
        skip: patterns of layers to leave unchanged.

    Returns:
        The model.

    Raises:
        WiringError: if a layer is of another kind, or no batch reaches it. The model is left unchanged.
    """
    if not isinstance(model, nn.Module):
        raise WiringError(f"prune_() expects a torch.nn.Module, got {type(model).__name__}.")
    if not isinstance(by, str) or by not in BY:
        raise unknown("by", str(by), BY)
    check_density(density, "prune_: density", "")
    if isinstance(batches, (Tensor, Mapping)):
        raise WiringError(
            f"prune_ expects several batches, got a {type(batches).__name__}: write [batch] if it is one."
        )
    if not isinstance(batches, Iterable):
        raise WiringError(
            f"prune_: batches must be an iterable of batches, such as a DataLoader, got {brief(batches)}."
        )
    check_not_wrapped(model)
    targets = find(model, check_patterns("include", include), check_patterns("skip", skip) or [])
    for target in targets:
        check_wirable(target, model)
        _check_kind(target)
    squares = _squares_on(model, targets, batches)
    masks = []
    with torch.no_grad():
        for target in targets:
            weight = target.weight.detach()
            size = weight.abs().to(torch.promote_types(weight.dtype, torch.float32))
            score = size * squares[target.name].sqrt()
            if not bool(torch.isfinite(score).all()):
                raise WiringError(
                    f"prune_: the inputs of {target.name} are not finite on these batches, so that its edges cannot be "
                    "ranked. Check the batches and the model's precision."
                )
            if by == "layer":
                masks.append(functional.choose(score, floor_of(density, score.numel())))
            else:
                masks.append(_strongest_of_each(score, receivers(*target.places[0][1:], weight), density))
        for target, mask in zip(targets, masks, strict=True):
            target.weight.masked_fill_(~mask, 0.0)
    return model


def _check_kind(target: Target) -> None:
    """Raise unless it is known what each edge of a weight multiplies."""
    for name, module, _ in target.places:
        known = isinstance(module, (nn.Linear, nn.Embedding, *CONVOLUTIONS)) or is_transposed_linear(module)
        if not known:
            raise WiringError(
                f"prune_ scores linear and convolution layers, but {name} belongs to a {type(module).__name__}; use "
                f"skip=[{name!r}]."
            )
    if is_sharded(target.weight):
        raise WiringError(f"prune_: {target.name} is sharded over processes; prune the model before fully_shard.")


def _squares_on(model: nn.Module, targets: Sequence[Target], batches: Iterable[Any]) -> dict[str, Tensor]:
    """For every weight: the sum of the squares of what each edge multiplies, of a shape that broadcasts to it."""
    found: dict[str, Tensor] = {}
    handles = []

    def listen(target: Target, module: nn.Module) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            more = _squares(module, x.detach())
            found[target.name] = found[target.name] + more if target.name in found else more

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    for target in targets:
        for _, module, _ in target.places:
            if not isinstance(module, nn.Embedding):  # tied to an output layer, whose inputs count
                listen(target, module)
    device = next(model.parameters()).device
    ran = False
    try:
        with torch.no_grad(), _evaluating(model):
            for batch in batches:
                args, kwargs = _arguments(batch, device)
                model(*args, **kwargs)
                ran = True
    except WiringError:
        raise
    except Exception as error:  # whatever a model raises for inputs that do not fit it
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200].rstrip(".")
        raise WiringError(f"prune_: {type(model).__name__} cannot be run on a batch: {reason}.") from error
    finally:
        for handle in handles:
            handle.remove()
    if not ran:
        raise WiringError("prune_ needs at least one batch to score edges on, but batches is empty.")
    for target in targets:
        if target.name not in found:
            raise WiringError(
                f"no batch reaches {target.name}, so its edges have no score; use skip=[{target.name!r}], or batches "
                "that use the layer."
            )
    return found


def _arguments(batch: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What to call the model with for a batch."""
    if isinstance(batch, (tuple, list)) and batch:
        batch = batch[0]
    if isinstance(batch, Tensor):
        return (batch.to(device),), {}
    if isinstance(batch, Mapping):
        return (), {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}
    raise WiringError(
        "prune_: a batch must be a tensor, a mapping of keyword arguments, or a tuple or list whose first entry is one "
        f"of these, got {type(batch).__name__}."
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, in which norms do not change; afterwards every module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _squares(module: nn.Module, x: Tensor) -> Tensor:
    """The sum of the squares of what each edge of a layer multiplies, of a shape that broadcasts to its weight."""
    squares = x.to(torch.promote_types(x.dtype, torch.float32)).square()  # in float16 they would overflow
    if isinstance(module, CONVOLUTIONS):
        return _squares_in_windows(module, squares)
    total = squares.reshape(-1, squares.shape[-1]).sum(0)
    return total.unsqueeze(1) if is_transposed_linear(module) else total


def _squares_in_windows(module: Any, squares: Tensor) -> Tensor:
    """The sums for a convolution, whose edges see different pixels because of padding and strides.

    A convolution is linear in its weight, so that the gradient of the sum of its outputs is the sum of what each edge
    multiplies. All output channels of a group see the same, so one of each is enough.
    """
    transposed = isinstance(module, TRANSPOSED_CONVOLUTIONS)
    first = (module.in_channels, 1) if transposed else (module.groups, module.in_channels // module.groups)
    weight = squares.new_zeros(*first, *module.kernel_size)
    with torch.enable_grad():
        weight.requires_grad_()
        if transposed:
            run = next(run for kind, run in _TRANSPOSED.items() if isinstance(module, kind))
            out = run(
                squares,
                weight,
                None,
                module.stride,
                module.padding,
                module.output_padding,
                module.groups,
                module.dilation,
            )
        else:
            out = module._conv_forward(squares, weight, None)
        (found,) = torch.autograd.grad(out.sum(), weight)
    return found if transposed else found.repeat_interleave(module.out_channels // module.groups, 0)


def _strongest_of_each(score: Tensor, receiver: Tensor, density: float) -> Tensor:
    """A mask of the incoming edges with the largest scores of every node, equally many; ties go to the earlier edge."""
    node = receiver.to(score.device).expand(score.shape).reshape(-1)
    by_score = score.reshape(-1).argsort(descending=True, stable=True)
    order = by_score[node[by_score].argsort(stable=True)].view(int(node.max()) + 1, -1)
    kept = order[:, : floor_of(density, order.shape[1])].reshape(-1)
    return torch.zeros_like(node, dtype=torch.bool).scatter_(0, kept, True).view(score.shape)
