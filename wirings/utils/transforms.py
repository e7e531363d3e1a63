"""Whether a tensor is being transformed by `torch.func`."""

import torch
from torch import Tensor


def in_transform(tensor: Tensor) -> bool:
    """Whether a tensor is wrapped by `torch.func` (``vmap``, ``grad``, …) and so has no version of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)
