"""Networks on graphs, whose edges are given by indices: traced for a batch of one, pruned, and written to files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wirings import WiringError, compact, engine, load_compact, wire_
from wirings.compaction.check_program import check_program
from wirings.compaction.operations import PickTokens, SumTokens, TorchOperator
from wirings.compaction.program import Program


class Messages(nn.Module):
    """Messages along edges, in one of the ways in which libraries write them; a batch has one graph."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.message, self.own, self.head = (nn.Linear(a, b) for a, b in ((5, 8), (8, 8), (8, 8), (8, 3)))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, to = edges[0][0], edges[0][1]
        x = F.relu(self.first(nodes[0]))
        sent = self.message(x)
        if self.way == "index_add":
            sums = torch.zeros_like(x).index_add_(0, to, sent[source])
        elif self.way == "add to nodes":
            sums = (x * 2).index_add(0, to, sent.index_select(0, source))
        elif self.way == "scatter_add":
            sums = x.new_zeros(x.shape).scatter_add_(0, to.view(-1, 1).expand(-1, 8), sent.index_select(0, source))
        else:
            sums = torch.zeros_like(x).index_add_(0, to, sent[source], alpha=0.5)
        return self.head(F.relu(self.own(x) + sums))[None]  # type: ignore[no-any-return]


def graph() -> tuple[Tensor, Tensor]:
    return torch.randn(1, 12, 5), torch.randint(12, (1, 2, 30))


@pytest.mark.parametrize("way", ["index_add", "add to nodes", "scatter_add"])
def test_messages_run_in_the_engine(way: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, example = Messages(way).eval(), graph()
    wire_(model, "random", density=0.5)
    small = compact(model, example)
    kinds = [type(o) for o in small.program.operations]
    assert kinds.count(PickTokens) == kinds.count(SumTokens) == 1
    assert TorchOperator not in kinds
    nodes, edges = graph()
    with torch.no_grad():
        expected = model(nodes, edges)
    torch.testing.assert_close(small(nodes, edges), expected)
    again = load_compact(small.save(tmp_path / "model.safetensors"))
    assert torch.equal(again(nodes, edges), small(nodes, edges))
    for kind in ("onnx", "pt2"):
        assert small.save(tmp_path / f"model.{kind}").exists()  # compares the outputs
    fast = engine.compile(small, engine="sparse", threads=2)
    torch.testing.assert_close(fast(nodes, edges), expected, rtol=1e-4, atol=1e-5)


def test_other_sums_stay_on_pytorch() -> None:
    model, example = Messages("half").eval(), graph()
    small = compact(model, example)
    assert not any(isinstance(o, SumTokens) for o in small.program.operations)
    torch.testing.assert_close(small(*example), model(*example).detach())


def test_a_model_without_a_batch_takes_a_batch_of_one() -> None:
    small = compact(Messages("index_add").eval(), graph())
    with pytest.raises(WiringError, match="batch size of 1, got a batch of 2"):
        small(torch.randn(2, 12, 5), torch.randint(12, (2, 2, 30)))


def test_features_that_nothing_needs_are_removed() -> None:
    torch.manual_seed(0)
    model, example = Messages("index_add").eval(), graph()
    with torch.no_grad():
        model.head.weight[:, 3:] = 0
    small = compact(model, example)
    (made,) = (o for o in small.program.operations if isinstance(o, SumTokens))
    assert small.program.shapes()[made.output][0] == 3
    torch.testing.assert_close(small(*example), model(*example).detach())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"start": 30, "count": 31, "tokens": 12}, "indices among the integers"),
        ({"start": -1, "count": 30, "tokens": 12}, "indices among the integers"),
        ({"start": 0, "count": 30, "tokens": 11}, "12 tokens|11 tokens"),
    ],
)
def test_invalid_fields_in_files(fields: dict[str, Any], message: str) -> None:
    operation = PickTokens("y", ("x", "edges"), **fields)
    program = Program({"x": (3, 12), "edges": (2, 30)}, [operation], ("y",), {"types": {"edges": "torch.int64"}})
    with pytest.raises(WiringError, match=message):
        check_program(program, 2**30)
