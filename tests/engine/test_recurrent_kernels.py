"""Recurrent layers in the engine compute what PyTorch does: any sizes, states, threads, and ways of computing them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from wirings import compact, engine
from wirings.compaction.operations import Recurrent
from wirings.compaction.operations.recurrent import GATES
from wirings.compaction.program import Program

pytestmark = pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")


@settings(max_examples=60)
@given(
    kind=st.sampled_from(list(GATES)),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 70), st.integers(1, 40)),
    density=st.sampled_from([0.05, 0.3, 1.0]),
    biases=st.booleans(),
    reverse=st.booleans(),
    given_states=st.booleans(),
    cell=st.booleans(),
    threads=st.integers(1, 3),
    way=st.sampled_from(["sparse", "dense"]),
    seed=st.integers(0, 2**16),
)
def test_any_layer(
    kind: str,
    sizes: tuple[int, int, int],
    density: float,
    biases: bool,
    reverse: bool,
    given_states: bool,
    cell: bool,
    threads: int,
    way: str,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    channels, units, tokens = sizes
    rows = GATES[kind] * units

    def edges(*shape: int) -> Tensor:
        return torch.randn(shape) * (torch.rand(shape) < density) / (1 + density * shape[1]) ** 0.5

    shapes: dict[str, tuple[int, ...]] = {"x": (channels, tokens)}
    if given_states:
        shapes |= dict.fromkeys(["h", "c"] if kind == "lstm" else ["h"], (units,))
    own = (torch.randn(rows), torch.randn(rows)) if biases else (None, None)
    weights = edges(rows, channels), edges(rows, units)
    layer = Recurrent("y", tuple(shapes), *weights, *own, kind, reverse, cell and kind == "lstm")
    program = Program(shapes, [layer], ("y",))
    fast = engine.compile(program, engine=way, threads=threads)
    assert not fast.uses_torch
    for batch in (1, 1, 4):  # twice, since the counters of the threads are zero again
        inputs = [torch.randn(batch, *shape) for shape in shapes.values()]
        torch.testing.assert_close(fast(*inputs), program.run(*inputs)[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("way", ["sparse", "dense"])
def test_every_number_of_parts(way: str) -> None:
    """Units are divided among threads only where that is faster, or measured."""
    torch.manual_seed(0)
    layer = Recurrent("y", ("x",), torch.randn(4 * 50, 8), 0.1 * torch.randn(4 * 50, 50))
    program = Program({"x": (8, 25)}, [layer], ("y",))
    fast = engine.compile(program, engine=way, threads=4)
    plan = fast._segments[0].plan
    assert plan is not None
    number = next(i for i, step in enumerate(plan.steps) if step.kind == "recurrent")
    choices = plan.choices_of(plan.steps[number])
    assert {choice.strips for choice in choices} == {1, 4}
    x = torch.randn(1, 8, 25)
    for choice in choices:
        plan.choose([choice if i == number else own for i, own in enumerate(plan.choices)])
        for _ in range(20):
            torch.testing.assert_close(fast(x), program.run(x)[0], rtol=1e-4, atol=1e-5)


def test_gates_are_accurate_where_they_saturate() -> None:
    torch.manual_seed(0)
    for kind, gates in GATES.items():
        layer = Recurrent("y", ("x",), 30 * torch.randn(gates * 16, 3), torch.zeros(gates * 16, 16), kind=kind)
        program = Program({"x": (3, 20)}, [layer], ("y",))
        x = torch.randn(2, 3, 20)
        exact = program.to(torch.float64).run(x.double())[0].float()  # sums of hundreds are rounded to 1e-5
        torch.testing.assert_close(engine.compile(program)(x), exact, rtol=1e-5, atol=2e-5)


class States(nn.Module):
    """A layer that is given states in the layout of its inputs, and returns its last ones."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *first: Tensor) -> tuple[Tensor, ...]:
        states = tuple(state.transpose(0, 1).contiguous() for state in first)
        found, last = self.layer(x, (states if len(states) > 1 else states[0]) if states else None)
        return found, *(state.transpose(0, 1) for state in (last if isinstance(last, tuple) else (last,)))


@pytest.mark.parametrize("given_states", [False, True])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_states_of_several_layers_and_directions(layer: type[nn.RNNBase], given_states: bool) -> None:
    torch.manual_seed(0)
    model = States(layer(6, 19, num_layers=2, bidirectional=True, batch_first=True)).eval()  # type: ignore[call-arg]
    inputs = [torch.randn(3, 11, 6)]
    if given_states:
        inputs += [torch.randn(3, 4, 19) for _ in range(2 if layer is nn.LSTM else 1)]
    fast = engine.compile(compact(model, tuple(inputs)), engine="sparse", threads=2)
    assert all(segment.plan is not None for segment in fast._segments)
    with torch.no_grad():
        for found, expected in zip(fast(*inputs), model(*inputs), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
