"""Have PEFT raise where it would write to a wired weight and lose what it writes.

A layer of PEFT writes to ``base_layer.weight`` when it merges its adapters, and in some of their initializations. If
the layer is wired, that is a value which is computed anew whenever it is read: training would be lost without a word.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from wirings.errors import WiringError
from wirings.utils.layers import parametrizations_of
from wirings.wire.edges import Edges

_GUARDED = "_minds_wirings"
_MERGE = (
    "merge() of PEFT does not reach wired weights, so that what the adapters have learned would be lost. Call "
    "wirings.merge_adapters_(model), which merges them within the wiring; wirings.finalize_ comes after that."
)
_INITIALIZE = (
    "{name} of PEFT writes to the weight below the adapter, but does not reach a wired one. Use another "
    'initialization, such as init_lora_weights=True or "gaussian".'
)
_WRITING = {
    "merge": _MERGE,
    **{f"{kind}_init": _INITIALIZE for kind in ("pissa", "olora", "corda", "loftq", "lora_ga")},
}
"""The methods of PEFT's layers that write to the weight of the layer below, and the error for a wired one."""


def guard_adapters() -> None:
    """Guard PEFT's layers, if it is imported. Those of layers that are not wired work as before.

    The classes are changed and not the layers, since adapters may be added at any time after wiring.
    """
    layer: Any = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", None)
    for cls in set() if layer is None else {layer, *_subclasses(layer)}:
        for name, text in _WRITING.items():
            method = vars(cls).get(name)
            if method is not None and not hasattr(method, _GUARDED):
                setattr(cls, name, _guarded(method, text.format(name=name)))


def _subclasses(cls: Any) -> Iterator[type]:
    for below in cls.__subclasses__():
        yield below
        yield from _subclasses(below)


def _guarded(method: Callable[..., Any], text: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        holders = parametrizations_of(self.get_base_layer()).values()
        if any(isinstance(holder._modules.get("0"), Edges) for holder in holders):
            raise WiringError(text)
        return method(self, *args, **kwargs)

    setattr(guarded, _GUARDED, True)
    return guarded
