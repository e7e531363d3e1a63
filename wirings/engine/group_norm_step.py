"""The step of a group norm; ``source/group_norm.h`` has the same fields in the same order."""

from __future__ import annotations

from ctypes import c_float, c_int32, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from wirings.engine.bounds import expect_inside
from wirings.engine.kernel_step import StepKind
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.token_steps import OwnStep, StepContext, floats_read, floats_written, register_struct


@register_struct
@dataclass(eq=False)
class GroupNormStep(OwnStep):
    """A norm over the channels of each group and all pixels."""

    kind = StepKind.GROUP_NORM
    layout = (
        *((name, c_void_p) for name in ("in_", "out", "scale", "shift", "starts")),
        *((name, c_int32) for name in ("height", "width", "pitch", "out_pitch", "features")),
        ("epsilon", c_float),
    )
    source: FeatureMaps
    out: FeatureMaps
    scale: np.ndarray
    shift: np.ndarray
    sizes: tuple[int, ...]
    features: int
    epsilon: float

    def reads(self) -> list[FeatureMaps]:
        return [self.source]

    def fields(self, context: StepContext) -> tuple[dict[str, Any], int]:
        memory = context.memory
        in_, out = memory.offsets(self.source), memory.offsets(self.out)
        expect_inside("a norm", in_, floats_read(self.source, memory, context.lanes), context.floats)
        expect_inside("a norm", out, floats_written(self.out, memory), context.floats)
        starts = np.cumsum([0, *self.sizes])
        expect_inside("a norm", starts[:1], int(starts[-1]), min(len(x) for x in (in_, out, self.scale, self.shift)))
        values = {
            "in_": in_,
            "out": out,
            "scale": self.scale,
            "shift": self.shift,
            "starts": starts,
            "height": self.source.height,
            "width": self.source.width,
            "pitch": memory.pitch(self.source),
            "out_pitch": memory.pitch(self.out),
            "features": self.features,
            "epsilon": self.epsilon,
        }
        return values, len(self.sizes)
