"""Expander graphs: equal numbers of incoming edges, chosen at random and fixed."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import wirings
from wirings import StaticGraph
from wirings.graph import ActivationNode
from wirings.rules import Expander


def fan_in(mask: torch.Tensor) -> list[int]:
    return mask.flatten(1).sum(1).tolist()


@pytest.mark.parametrize(("k", "expected"), [(4, [1, 1, 1, 1]), (8, [2, 2, 2, 2]), (10, [2, 2, 3, 3]), (24, [6] * 4)])
def test_equal_fan_in(k: int, expected: list[int]) -> None:
    wiring = wirings.wire_(nn.Linear(6, 4), Expander(seed=0), k=k)
    assert sorted(fan_in(wiring.masks()["weight"])) == expected


def test_a_node_with_few_allowed_edges_has_them_all_and_the_others_the_rest() -> None:
    allowed = torch.ones(4, 6).bool()
    allowed[1, 1:] = False
    wiring = wirings.wire_(nn.Linear(6, 4), Expander(seed=0), k=10, allowed={"weight": allowed})
    mask = wiring.masks()["weight"]
    assert fan_in(mask) == [3, 1, 3, 3]
    assert not (mask & ~allowed).any()


def test_channels_and_graphs() -> None:
    wiring = wirings.wire_(nn.ConvTranspose2d(4, 6, 3, groups=2), Expander(), k=30)
    mask = wiring.masks()["weight"].view(2, 2, 3, 9)  # (group, in, out, kernel)
    assert mask.sum((1, 3)).tolist() == [[5, 5, 5]] * 2
    # Nodes 2 and 3 may receive from two, nodes 4 to 6 from four: of 13 edges the first have all of theirs.
    graph = StaticGraph([2, 2, 3], node=ActivationNode("tanh"), edges=13, rule="expander")
    assert graph.real()[:4].all()
    assert graph.real()[4:].view(3, 4).sum(1).tolist() == [3, 3, 3]


def test_a_global_budget_is_dealt_to_all_nodes() -> None:
    model = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 4))
    wiring = wirings.wire_(model, Expander(), k=17, share="global")  # 7 nodes, 2 or 3 each
    counts = [fan_in(mask) for mask in wiring.masks().values()]
    assert sorted(counts[0] + counts[1]) == [2, 2, 2, 2, 3, 3, 3]


def test_the_seed() -> None:
    def mask(seed: int | None) -> torch.Tensor:
        return wirings.wire_(nn.Linear(20, 10), Expander(seed), k=45).masks()["weight"]

    assert torch.equal(mask(3), mask(3))
    assert not torch.equal(mask(3), mask(4))
    assert not torch.equal(mask(None), mask(None))


def test_edges_are_uniformly_random() -> None:
    count = sum(wirings.wire_(nn.Linear(4, 3), Expander(seed), k=4).masks()["weight"].int() for seed in range(600))
    assert ((count > 140) & (count < 260)).all(), "each edge is chosen one time in three"


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**30), st.data())
def test_exactly_k_and_as_equal_as_possible(nodes: int, sends: int, seed: int, data: st.DataObject) -> None:
    allowed = torch.rand(nodes, sends, generator=torch.Generator().manual_seed(seed)) < 0.7
    allowed[0, 0] = True
    k = data.draw(st.integers(1, int(allowed.sum())))
    wiring = wirings.wire_(nn.Linear(sends, nodes), Expander(seed), k=k, allowed={"weight": allowed})
    mask = wiring.masks()["weight"]
    assert int(mask.sum()) == k
    assert not (mask & ~allowed).any()
    counts, most = fan_in(mask), fan_in(allowed)
    for count, limit in zip(counts, most, strict=True):
        assert count == limit or count >= max(counts) - 1


def test_a_schedule_keeps_one_order_and_a_checkpoint_keeps_the_graph() -> None:
    model = nn.Linear(6, 4)
    wiring = wirings.wire_(model, Expander(), density=wirings.LinearSchedule(1.0, 0.25, steps=6))
    before = wiring.masks()["weight"]
    for step in range(6):
        wiring.step()
        mask = wiring.masks()["weight"]
        assert not (mask & ~before).any(), "edges are removed, none is added"
        assert max(fan_in(mask)) - min(fan_in(mask)) <= 1
        before = mask
        if step == 2:
            saved, about = copy.deepcopy(model.state_dict()), wiring.state_dict()
    other = nn.Linear(6, 4)
    again = wirings.wire_(other, Expander(), density=wirings.LinearSchedule(1.0, 0.25, steps=6))
    other.load_state_dict(saved)
    again.load_state_dict(about)
    for _ in range(3):
        again.step()
    assert torch.equal(again.masks()["weight"], before)
