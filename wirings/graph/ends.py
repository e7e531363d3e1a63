"""What comes before and after graphs of maps: the first convolution of images, and the mean of the last maps.

These are ordinary layers of PyTorch. On a GPU they are computed by kernels that store maps node by node, as graphs do
(`wirings.graph._ends_cuda`), where nothing but the result is asked for: a layer with a hook, a parametrization or a
class of its own is called, and so is every layer under a compiler, a tracer or a mode.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from wirings.graph.nodes.conv import BATCH_MOMENTUM, note_statistics
from wirings.utils.transforms import is_plain

_TRITON = importlib.util.find_spec("triton") is not None
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def first_maps(convolution: nn.Conv2d, images: Tensor) -> Tensor:
    """Return ``convolution(images)``, (batch, channels, height, width); on a GPU stored node by node if possible.

    Args:
        convolution: the layer before the first graph.
        images: the images, (batch, channels, height, width).
    """
    seen = torch.compiler.is_compiling() or images.requires_grad
    if images.is_cuda and not seen and _is_usual(convolution):
        kernels, weight = _kernels(images, convolution), convolution.weight
        lowered = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if lowered else images.dtype
        alike = lowered or images.dtype == weight.dtype
        if kernels is not None and alike and kernels.convolution_fits(images, weight, dtype):
            return kernels.convolve(images, weight, convolution.stride[0], dtype).transpose(0, 1)
    return convolution(images)


def convolves(convolution: nn.Conv2d, dtype: torch.dtype) -> bool:
    """Return whether `first_maps` computes a layer in our kernels on a GPU, in this precision."""
    if not _TRITON or not _is_usual(convolution) or _is_hooked(convolution):
        return False
    from wirings.graph import _ends_cuda

    return is_plain(convolution.weight) and _ends_cuda.kernel_fits(convolution.weight, dtype)


def pooled_maps(maps: Tensor, norm: nn.BatchNorm2d, activation: nn.Module) -> Tensor:
    """Return the mean of every map after ``norm`` and ``activation``, (batch, channels).

    Args:
        maps: the output of the last graph, (batch, channels, height, width).
        norm: the norm after the last graph.
        activation: the activation after the norm.
    """
    usual = maps.is_cuda and not torch.compiler.is_compiling() and type(activation) is nn.ReLU
    if usual and _is_usual_norm(norm) and maps.dim() == 4 and maps.shape[1] == norm.num_features:
        kernels, rows = _kernels(maps, norm, activation), maps.transpose(0, 1)
        # PyTorch's norm raises the error if there is only one value to train on.
        if kernels is not None and kernels.pooling_fits(rows) and (not norm.training or rows[0].numel() > 1):
            return _pooled(kernels, rows, norm)
    return activation(norm(maps)).mean((-2, -1))


def _pooled(kernels: Any, rows: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    statistics = (None, None) if norm.training else (norm.running_mean, norm.running_var)
    pooled, mean, var = kernels.pool(rows, norm.weight, norm.bias, *statistics, norm.eps)
    if norm.training:
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
        note_statistics([norm], [(mean, var)], [rows[0].numel()])
    return pooled.t()


def _kernels(x: Tensor, *layers: nn.Module) -> Any:
    """The CUDA kernels, if these layers can be computed from ``x`` without being called, or None."""
    tensors = [x, *(parameter for layer in layers for parameter in layer.parameters())]
    if not _TRITON or not all(map(is_plain, tensors)) or any(map(_is_hooked, layers)):
        return None
    if any(tensor.device != x.device for tensor in tensors):
        return None
    from wirings.graph import _ends_cuda

    return _ends_cuda


def _is_usual(convolution: nn.Conv2d) -> bool:
    """Whether a layer is a 3x3 convolution as the kernels compute it."""
    return (
        type(convolution) is nn.Conv2d
        and convolution.kernel_size == (3, 3)
        and convolution.stride in ((1, 1), (2, 2))
        and convolution.padding == (1, 1)
        and convolution.padding_mode == "zeros"
        and convolution.dilation == (1, 1)
        and convolution.groups == 1
        and convolution.bias is None
    )


def _is_usual_norm(norm: nn.Module) -> bool:
    """Whether a layer is a batch norm with learned parameters and with running statistics of the usual momentum."""
    return (
        type(norm) is nn.BatchNorm2d
        and norm.affine
        and norm.running_mean is not None
        and norm.running_mean.dtype == torch.float32
        and norm.momentum == BATCH_MOMENTUM
    )


def _is_hooked(layer: nn.Module) -> bool:
    """Whether a call of a layer would run hooks: its own, or those of all modules."""
    own = any(getattr(layer, name) for name in _HOOKS)
    return own or any(getattr(torch_module, f"_global{name}") for name in _HOOKS)
