"""Budgets: densities, numbers, mappings, shares and schedules, with counts computed by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wirings import ConstantSchedule, CubicSchedule, LinearSchedule, WiringError
from wirings.budgets.budget import Budget, LayerSize, Ramp, matches


def sizes(*shapes: tuple[int, ...]) -> list[LayerSize]:
    return [LayerSize((f"layer{i}.weight",), shape, math.prod(shape)) for i, shape in enumerate(shapes)]


def test_a_density_is_rounded_down_in_every_layer() -> None:
    assert Budget(density=0.1).counts(sizes((10, 10), (5, 5), (3, 3))) == [10, 2, 1]
    assert Budget(density=0.29).counts(sizes((10, 10))) == [29], "not 28, which 0.29 * 100 = 28.999… would give"
    assert Budget(density=0.01).counts(sizes((3, 3))) == [1], "at least one edge"
    assert Budget(density=1.0).counts(sizes((3, 3), (2, 7))) == [9, 14]
    assert Budget(density=1).counts(sizes((3, 3))) == [9]
    assert Budget(k=np.int64(4)).counts(sizes((3, 3))) == [4]
    assert Budget(density=np.float32(0.5)).counts(sizes((4, 4))) == [8]
    assert Budget(density=ConstantSchedule(0.5)).counts(sizes((4, 4)), step=9) == [8]


def test_k_is_the_total_number() -> None:
    assert Budget(k=10).counts(sizes((10, 10))) == [10]
    assert Budget(k=50).counts(sizes((10, 10), (5, 20), (10, 5))) == [20, 20, 10]
    assert Budget(k=7).counts(sizes((10, 10), (5, 20), (10, 5))) == [3, 3, 1]
    assert Budget(k=4).counts(sizes((100, 100), (2, 2), (2, 2))) == [2, 1, 1], "no layer is cut off"


def test_mapping_uses_the_first_matching_pattern() -> None:
    budget = Budget(mapping={"layer0": 7, "layer1*": 0.5, "*": 0.1})
    assert budget.counts(sizes((10, 10), (4, 4), (10, 10))) == [7, 8, 10]
    assert budget.amount_for(["layer1.weight"]) == 0.5
    assert Budget(mapping={"layer0": LinearSchedule(1.0, 0.5, steps=2)}).counts(sizes((4, 4)), 1) == [12]


def test_erk_by_hand() -> None:
    # sum / product: 20/100, 12/20: raw densities 0.2 and 0.6, edges 20 and 12 for scale 1; 16 edges are half of that.
    assert Budget(k=16, share="erk").counts(sizes((10, 10), (2, 10))) == [10, 6]
    # 60 edges: scale 60/32 would fill the second layer (0.6 * 1.875 > 1), so it is full and the first gets the rest.
    assert Budget(k=60, share="erk").counts(sizes((10, 10), (2, 10))) == [40, 20]
    # A convolution counts its kernel too: (4 + 4 + 3 + 3) / 144.
    assert Budget(density=0.5, share="erk").counts(sizes((4, 4, 3, 3), (12, 12))) == [53, 91]


def test_global_is_one_number() -> None:
    assert Budget(density=0.25, share="global").counts(sizes((10, 10), (2, 10))) == [30]
    assert Budget(k=31, share="global").counts(sizes((10, 10), (2, 10))) == [31]


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=8),
    st.floats(0.001, 1.0),
    st.sampled_from(["uniform", "erk"]),
)
def test_a_total_is_met_exactly(shapes: list[tuple[int, int]], fraction: float, share: str) -> None:
    layers = sizes(*shapes)
    total = sum(size.allowed for size in layers)
    k = max(len(layers), int(fraction * total))
    counts = Budget(k=k, share=share).counts(layers)
    assert sum(counts) == k
    assert all(1 <= count <= size.allowed for count, size in zip(counts, layers, strict=True))


@pytest.mark.parametrize("share", ["uniform", "erk"])
def test_no_layer_is_left_without_edges(share: str) -> None:
    layers = sizes((10, 10), (5, 5), (3, 3))
    with pytest.raises(WiringError, match=r"k = 2 edges cannot be shared out over 3 .* nearest that can be met is 3"):
        Budget(k=2, share=share).counts(layers)
    assert Budget(k=3, share=share).counts(layers) == [1, 1, 1]
    assert Budget(density=0.01, share=share).counts(layers) == [1, 1, 1], "at least one in each layer"
    assert Budget(k=2, share="global").counts(layers) == [2], "a ranking of all edges may leave a layer without any"


def test_accepts_numpy_numbers() -> None:
    layers = [LayerSize(("a",), (4, 4), 16, cost=4), LayerSize(("b",), (8, 4), 32, cost=2)]
    for params in (np.int64(29), np.int32(29), np.float64(29.0)):
        assert Budget(params=params).of_network(layers, 5) == Budget(k=24)
    assert Budget(mult_adds=np.int64(64)).of_network(layers, 0) == Budget(spent=64)
    assert Budget(mult_adds=np.float32(0.5)).of_network(layers, 0) == Budget(spent=64)
    with pytest.raises(WiringError, match=r"got (np\.)?True_?"):
        Budget(params=np.bool_(True))


def test_schedules_by_hand() -> None:
    linear, cubic = LinearSchedule(1.0, 0.2, steps=4, begin=1), CubicSchedule(1.0, 0.2, steps=4, begin=1)
    assert [linear(t) for t in range(7)] == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    expected = [1.0, 1.0, 0.2 + 0.8 * 0.75**3, 0.2 + 0.8 * 0.5**3, 0.2 + 0.8 * 0.25**3, 0.2, 0.2]
    assert [cubic(t) for t in range(7)] == pytest.approx(expected)
    assert LinearSchedule(0.1, 0.3, steps=2)(1) == pytest.approx(0.2), "a density may grow"
    assert Budget(density=linear).changes
    assert not Budget(density=0.1).changes
    assert Budget(mapping={"*": cubic}).changes


def test_schedules_in_fractions_of_training() -> None:
    cubic = CubicSchedule.over(1.0, 0.2, begin=0.25, end=0.75)
    assert cubic.relative
    assert cubic(0) == 1.0
    with pytest.raises(WiringError, match=r"does not know how long that is: call wiring\.plan\(steps\)"):
        cubic(1)
    assert cubic.planned(8) == CubicSchedule(1.0, 0.2, steps=4, begin=2)
    assert CubicSchedule(1.0, 0.2, steps=4, begin=2).planned(100).steps == 4, "schedules in steps are unchanged"
    assert LinearSchedule.over(1.0, 0.5).planned(10) == LinearSchedule(1.0, 0.5, steps=10)
    assert LinearSchedule.over(1.0, 0.5, begin=0.5, end=0.5).planned(10) == LinearSchedule(1.0, 0.5, steps=1, begin=5)
    planned = Budget(density=cubic).planned(8)
    assert planned.counts(sizes((10, 10)), 4) == [20 + 10]
    assert Budget(mapping={"*": cubic}).planned(8).counts(sizes((10, 10)), 4) == [30]


def test_changes_only_every_few_steps() -> None:
    linear = LinearSchedule(1.0, 0.2, steps=4, begin=1, every=2)
    assert [linear(t) for t in range(7)] == pytest.approx([1.0, 1.0, 1.0, 0.6, 0.6, 0.2, 0.2])


def test_the_ramp_of_a_rule() -> None:
    """100 and 25 edges with a budget of 10 and 2: at first 90 and 23 more, of which (1 − t)³ are left."""
    budget = Budget(density=0.1, ramp=Ramp.of("cubic")).planned(8)
    assert budget.changes
    expected = [[100, 25], [10 + int(90 * 0.75**3), 2 + int(23 * 0.75**3)], [21, 4], [11, 2], [10, 2], [10, 2]]
    assert [budget.counts(sizes((10, 10), (5, 5)), step) for step in range(6)] == expected
    linear = Ramp.of({"kind": "linear", "start": 0.5, "begin": 0.5, "end": 1.0, "every": 2})
    budget = Budget(k=25, share="global", ramp=linear).planned(8)
    assert [budget.counts(sizes((10, 10), (5, 5)), s) for s in (0, 4, 5, 6, 7, 8)] == [
        [62],
        [62],
        [62],
        [43],
        [43],
        [25],
    ]
    assert Budget(density=0.6, ramp=linear).counts(sizes((10, 10))) == [60], "a budget larger than the starting number"
    with pytest.raises(WiringError, match="drop one of them"):
        Budget(density=LinearSchedule(1.0, 0.5, steps=2), ramp=linear)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (0.5, 'a rule\'s schedule must be "cubic", "linear", or a mapping'),
        ("quadratic", "unknown kind of schedule 'quadratic'.*cubic, linear"),
        ({"knd": "cubic"}, "unknown setting of a rule's schedule 'knd'. Did you mean 'kind'"),
        ({"start": 0}, r"CubicSchedule.start must be in \(0, 1\]"),
        ({"end": 1.5}, "end must be a fraction of training, from 0 to 1, got 1.5"),
        ({"begin": 0.9}, "begin = 0.9 must not be after end = 0.5"),
        ({"begin": "early"}, "begin must be a fraction of training"),
        ({"every": 0}, "needs every >= 1"),
    ],
)
def test_mistakes_in_ramps(given: object, says: str) -> None:
    with pytest.raises(WiringError, match=says):
        Ramp.of(given)


def test_patterns() -> None:
    assert matches("layer1.0.conv1.weight", "layer1")
    assert matches("layer1.0.conv1.weight", "*.conv?")
    assert not matches("layer10.conv1.weight", "layer1")
    assert not matches("layer1.0.conv1.weight", "conv1")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "got none"),
        ({"density": 0.1, "k": 3}, "got density and k"),
        ({"density": 0.0}, r"\(0, 1\].*got 0.0"),
        ({"density": -0.1}, r"\(0, 1\].*got -0.1"),
        ({"density": 1.5}, "For 1.5 % write 0.015"),
        ({"density": 10.0}, "For 10.0 % write 0.1"),
        ({"density": float("nan")}, "got nan"),
        ({"density": 2}, "Use k for a number of edges"),
        ({"density": "0.1"}, "'0.1'"),
        ({"k": 0}, "at least 1, got 0"),
        ({"k": 2.5}, "a whole number of edges, at least 1, got 2.5"),
        ({"k": True}, "a whole number of edges, at least 1, got True"),
        ({"mapping": 0.1}, "for one number for all layers use density= or k="),
        ({"mapping": {0: 0.5}}, "a pattern must be a string; write '0'"),
        ({"mapping": {"layer0": 0}}, "at least 1 edge, got 0"),
        ({"k": 10**6}, "allow only 125; lower k"),
        ({"mapping": {"layer0": 101}}, "101 edges were requested in layer0.weight.*only 100"),
        ({"mapping": {}}, "empty mapping"),
        ({"mapping": {"layer0": True}}, r"budget\['layer0'\] must be in .* Use an int for a number of edges"),
        ({"mapping": {"*": 0.5}, "share": "erk"}, "drop share='erk'"),
        ({"density": 0.1, "share": "erks"}, "unknown share 'erks'. Did you mean 'erk'"),
    ],
)
def test_mistakes(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(WiringError, match=says):
        Budget(**arguments).counts(sizes((10, 10), (5, 5)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [(0.0, 0.1, 5), (1.0, 1.2, 5), (1.0, 0.1, 0), (1.0, 0.1, 5, -1), (1.0, 0.1, 0.5, 0.6), (1.0, 0.1, 0.5, 3),
     (1.0, 0.1, 5, 0.5), (1.0, 0.1, 5, 0, 0), (1.0, 0.1, True)],
)  # fmt: skip
def test_mistakes_in_schedules(arguments: tuple[float, float, int]) -> None:
    with pytest.raises(WiringError, match="CubicSchedule"):
        CubicSchedule(*arguments)
