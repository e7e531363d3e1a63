"""Whether anything looks at the operations on a tensor: a transform of `torch.func`, a compiler, a mode."""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _device


def in_transform(tensor: Tensor) -> bool:
    """Whether a tensor is wrapped by `torch.func` (``vmap``, ``grad``, …) and so has no version of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is an ordinary one that only backward passes follow: no subclass, transform, mode or tracer."""
    return (
        type(tensor) in _PLAIN
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()  # even if it follows other tensors than this one
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and forward_ad._current_level < 0
        and not torch._C._len_torch_dispatch_stack()
        and (not torch._C._len_torch_function_stack() or _only_default_device())
        and torch._C._get_tracing_state() is None
    )


def _only_default_device() -> bool:
    """Whether the only active mode is that of a default device, which concerns new tensors alone."""
    only = torch._C._len_torch_function_stack() == 1
    return only and isinstance(torch._C._get_function_stack_at(0), _device.DeviceContext)


_PLAIN = (nn.Parameter, Tensor)
