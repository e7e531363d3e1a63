"""Registered models, compacted and compiled, return the same outputs and run on the kernels alone."""

from typing import Any

import pytest
import torch

import wirings
from wirings import engine, models

NETWORKS: dict[str, dict[str, Any]] = {
    "digits_static": {"rule": "dnw"},
    "tiny_static": {"rule": "dnw"},
    "mobilenetv1_dnw": {"rule": "dnw", "width": 0.1, "image_size": 32},
    "resnet18": {"rule": "dnw", "density": 0.05, "width": 0.25, "classes": 10, "image_size": 32},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_registered_models(name: str) -> None:
    torch.manual_seed(0)
    model = models.get(name, **NETWORKS[name])
    images = torch.randn(3, *getattr(model, "input_shape", (3, 32, 32)))
    with torch.no_grad():
        for _ in range(3):
            model.train()(images)
        expected = model.eval()(images)
    fast = engine.compile(wirings.compact(model, images), engine="sparse", threads=2)
    assert (fast(images) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert not engine.available() or [segment.plan is not None for segment in fast._segments] == [True]
