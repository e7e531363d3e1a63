"""Random graphs and wirings: compaction gives the same outputs, and leaves nothing that it could take."""

from typing import Any

import torch
from hypothesis import given, settings
from torch import Tensor

from tests.compact.drawn import graphs
from wirings import StaticGraph, WiringError
from wirings.compaction.compact import compact, shrunk
from wirings.compaction.report import count


@settings(max_examples=200)
@given(graphs())
def test_random_graphs_keep_their_outputs(drawn: tuple[StaticGraph, Tensor]) -> None:
    graph, x = drawn
    check(graph, x)


def check(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        other = torch.randn_like(x)
        expected = model(other)
        try:
            small = compact(model, x)
        except WiringError as error:
            assert "no path" in str(error), error
            constant = model(torch.randn_like(x))
            assert torch.allclose(constant, expected, rtol=1e-9, atol=1e-9)
            return
        found = small(other)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()) + 1e-12)
    again = count(shrunk(small.program))
    assert again == small.report.after
