"""Random transformers: compaction and the compiled kernels keep their outputs, and what is dead is removed."""

from collections import Counter

import pytest
import torch
from random_transformers import random_transformer
from torch import Tensor

from wirings import compact, engine
from wirings.compaction.compact import shrink
from wirings.compaction.operations import Attention, ChannelNorm
from wirings.compaction.program import Program
from wirings.compaction.report import program_size

COMPILED = engine.available()


NETWORKS = 200


def test_random_transformers_keep_their_outputs() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NETWORKS):
        model = random_transformer(seed)
        program, inputs = model.program(), model.example(3)
        with torch.no_grad():
            expected = model(*inputs)
        same(program.run(*inputs)[0], expected, 1e-9, seed)
        small = shrink(program)
        same(small.run(*inputs)[0], expected, 1e-9, seed)
        before, after = program_size(program), program_size(small)
        assert after.mult_adds <= before.mult_adds, seed
        assert after.edges <= before.edges, seed
        seen.update(cases(small))
        if COMPILED:
            way, threads = (("sparse", 1), ("dense", 2), ("sparse", 3))[seed % 3]
            fast = engine.compile(small, engine=way, threads=threads)
            given = [x.float() if x.is_floating_point() else x for x in inputs]
            same(fast(*given), small.to(torch.float32).run(*given)[0], 1e-4, seed)
    hard = ("uneven heads", "shared heads", "head without keys", "causal", "mask", "norm with missing channels")
    assert all(seen[case] >= 10 for case in hard), seen


def cases(program: Program) -> list[str]:
    """What is hard about a compact transformer."""
    found = []
    for o in program.operations:
        if isinstance(o, Attention):
            found += ["uneven heads"] * (len({*zip(o.sizes, o.value_sizes, strict=True)}) > 1)
            found += ["shared heads"] * (o.sharing > 1) + ["head without keys"] * (0 in o.sizes)
            found += ["causal"] * o.causal + ["mask"] * (o.mask is not None)
        elif isinstance(o, ChannelNorm):
            found += ["norm with missing channels"] * (len(o.scale) < o.features)
    return found


@pytest.mark.parametrize("seed", range(1000, 1004))
def test_traced_transformers_keep_their_outputs(seed: int) -> None:
    model = random_transformer(seed)
    small = compact(model, tuple(model.example(1)))
    inputs = model.example(3)
    with torch.no_grad():
        same(small(*inputs), model(*inputs), 1e-9, seed)
    assert small.report is not None
    assert small.report.after.mult_adds <= small.report.before.mult_adds


def same(found: Tensor, expected: Tensor, tolerance: float, seed: int) -> None:
    assert found.shape == expected.shape, seed
    difference = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-3)
    assert difference < tolerance, (seed, float(difference))
