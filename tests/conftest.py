"""Shared by all tests: one thread a process (they run side by side), a fixed seed."""

import os

# Read by OpenMP when PyTorch starts: two workers on two cores must not wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

settings.register_profile("wirings", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("wirings")


@pytest.fixture(autouse=True)
def _same_every_time() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
