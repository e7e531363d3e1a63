"""Fixtures for tests of weights that are made for all layers at once."""

import pytest
import torch

from wirings.selection import passes


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A CPU or a GPU, on both of which weights are made at once in these tests."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setattr(passes, "DEVICES", ("cpu", "cuda"))
    return str(request.param)
