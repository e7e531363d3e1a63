"""Continuous-time graphs, compared with matrix exponentials; gradients by backprop and by the adjoint equation."""

import pytest
import torch
from helpers import close
from torch import Tensor, nn

from wirings import ContinuousGraph, DiscreteGraph, WiringError
from wirings.graph import ActivationNode, ConvNode, Groups, TimeNode


def linear(dtype: torch.dtype = torch.float64, **settings: object) -> tuple[ContinuousGraph, Tensor]:
    """A graph without node functions, dZ/dt = A Z, with all 6 nodes read, and an input for 4 of them."""
    torch.manual_seed(0)
    graph = ContinuousGraph(6, inputs=4, outputs=6, **settings).to(dtype)  # type: ignore[arg-type]
    return graph, torch.randn(3, 4, dtype=dtype)


def exact(graph: ContinuousGraph, x: Tensor, matrix: Tensor, until: float = 1.0) -> Tensor:
    start = torch.cat([x, x.new_zeros(len(x), 2)], 1)  # the other nodes start at zero: an augmented neural ODE
    return start @ torch.linalg.matrix_exp(until * matrix).t()


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("until", [1.0, 2.5])
def test_a_linear_graph_is_a_matrix_exponential(adjoint: bool, until: float) -> None:
    errors, counts = [], []
    for tolerance in (1e-3, 1e-6, 1e-9):
        graph, x = linear(rtol=tolerance, atol=tolerance, adjoint=adjoint, until=until)
        matrix = graph.matrix().requires_grad_()
        x1, x2 = (x.clone().requires_grad_() for _ in range(2))
        y1, y2 = graph(x1), exact(graph, x2, matrix, until)
        y1.square().sum().backward()
        y2.square().sum().backward()
        pairs = [(y1, y2), (x1.grad, x2.grad), (graph._as_matrix(graph.weight.grad), matrix.grad)]
        error = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
        errors.append(error)
        counts.append(graph.effort.evaluations)
        assert error < 30 * until * tolerance
        assert (graph.adjoint_effort is not None) == adjoint
        if adjoint:
            assert graph.adjoint_effort.evaluations > 0
    assert errors[0] > 10 * errors[1] > 100 * errors[2]  # it shrinks with the tolerance
    assert counts[0] < counts[1] < counts[2]


def test_float32_is_within_its_tolerance() -> None:
    graph, x = linear(torch.float32, rtol=1e-6, atol=1e-6)
    close(graph(x), exact(graph, x, graph.matrix()), 1e-5)


@pytest.mark.parametrize("solver", ["euler", "midpoint", "rk4", "bosh3", "dopri5"])
def test_fixed_steps_converge(solver: str) -> None:
    errors = []
    for steps in (4, 8):
        graph, x = linear(solver=solver, steps=steps)
        errors.append((graph(x) - exact(graph, x, graph.matrix())).abs().max().item())
        assert graph.effort.accepted == steps
    order = {"euler": 1, "midpoint": 2, "bosh3": 3, "rk4": 4, "dopri5": 5}[solver]
    assert errors[1] < errors[0] / 2 ** (order - 0.5)


def test_euler_with_unit_steps_is_a_discrete_graph_with_a_residual() -> None:
    torch.manual_seed(0)
    node = ActivationNode("tanh", bias=True)
    graph = ContinuousGraph(7, inputs=3, outputs=7, solver="euler", steps=2, until=2.0, node=node)
    nn.init.normal_(graph.function.bias)
    discrete = DiscreteGraph(7, inputs=3, outputs=7, steps=1, node=node)
    discrete.load_state_dict(graph.state_dict())
    x = torch.randn(4, 3)
    states = graph.initial(x)
    for time in range(2):
        states = states + discrete.step(states, time)
    close(graph(x), states, 1e-6)


def test_adjoint_and_backprop_agree_as_the_tolerance_shrinks() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    differences = []
    parts = {"before": ["activation", "conv"], "after": ["norm"], "activation": "tanh"}
    for tolerance in (1e-2, 1e-4, 1e-7):
        grads = []
        for adjoint in (False, True):
            torch.manual_seed(1)
            graph = ContinuousGraph(
                12,
                inputs=3,
                outputs=2,
                edges=60,
                node=ConvNode(**parts),
                rtol=tolerance,
                atol=tolerance,
                adjoint=adjoint,
            ).double()
            graph(x).square().sum().backward()
            grads.append([p.grad for p in graph.parameters()])
        pairs = zip(*grads, strict=True)
        differences.append(max(((a - b).abs().max() / a.abs().max().clamp(min=1)).item() for a, b in pairs))
        assert (
            graph.all_weights().grad[~graph.real()] != 0
        ).any()  # hallucinated edges are reached by the adjoint, too
    assert differences[0] > 10 * differences[1] > 100 * differences[2]
    assert differences[2] < 1e-4


def test_nodes_can_depend_on_time() -> None:
    graph = ContinuousGraph(2, inputs=2, outputs=2, node=TimeNode(), rtol=1e-8, atol=1e-8).double()
    with torch.no_grad():
        graph.set_matrix_(torch.zeros(2, 2, dtype=torch.float64))
        graph.function.slope.copy_(torch.tensor([2.0, -4.0]))
    close(
        graph(torch.ones(1, 2, dtype=torch.float64)), torch.tensor([[2.0, -1.0]], dtype=torch.float64), 1e-7
    )  # 1 + t²


def test_strides_by_zero_padding_in_continuous_time() -> None:
    torch.manual_seed(0)
    parts = {"before": ["activation", "conv"], "after": ["norm"]}
    kinds = Groups([5, 5], [ConvNode(**parts), ConvNode(stride=2, pad=True, **parts)])
    graph = ContinuousGraph(10, inputs=3, outputs=2, edges=50, node=kinds)
    y = graph(torch.randn(2, 3, 8, 8))
    assert y.shape == (2, 2, 8, 8)
    y.square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in graph.function.parameters())


def test_initial_states_are_those_of_the_paper() -> None:
    graph = ContinuousGraph(5, inputs=[3, 1], outputs=5, edges=3)
    states = graph.initial(torch.tensor([[1.0, 2.0]]))
    assert torch.equal(states, torch.tensor([[0.0, 2.0, 0.0, 1.0, 0.0]]))


def test_half_precision_inside_leaves_the_states_in_float32() -> None:
    torch.manual_seed(0)
    node = ConvNode(before=["activation", "conv"], after=["norm"])
    graph = ContinuousGraph(60, inputs=8, outputs=10, edges=400, node=node)
    x = torch.randn(2, 8, 8, 8)
    full = graph(x)
    evaluations = graph.effort.evaluations
    with torch.autocast("cpu", torch.bfloat16):
        half = graph(x)
    assert half.dtype == torch.float32
    assert graph.effort.evaluations == evaluations
    assert 1e-5 < (half - full).abs().max() < 0.1


def test_solver_failures_raise() -> None:
    graph, x = linear()
    graph.set_matrix_(torch.full((6, 6), 1e200, dtype=torch.float64))
    with pytest.raises(WiringError, match=r"^ContinuousGraph.*(not finite|too large)"):
        graph(x)
    squares = ContinuousGraph(1, inputs=1, outputs=1, node=lambda nodes: Square())
    squares.set_matrix_(torch.ones(1, 1))
    with pytest.raises(WiringError, match=r"^ContinuousGraph.*step size became too small.*norm in the node function"):
        squares(torch.full((1, 1), 2.0))  # dz/dt = z² from 2 is infinite at t = 1/2
    fixed = ContinuousGraph(1, inputs=1, outputs=1, node=lambda nodes: Square(), solver="rk4", steps=50)
    fixed.set_matrix_(torch.ones(1, 1))
    with pytest.raises(WiringError, match=r"^ContinuousGraph.*not finite at the end"):
        fixed(torch.full((1, 1), 2.0))
    limited, x = linear(rtol=1e-9, atol=1e-9, max_steps=3)
    with pytest.raises(WiringError, match=r"^ContinuousGraph.*max_steps=3.*larger max_steps"):
        limited(x)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"solver": "dopri"}, "unknown solver 'dopri'. Did you mean 'dopri5'"),
        ({"solver": "euler"}, "'euler' has no error estimate"),
        ({"rtol": 0.0}, "rtol must be positive"),
        ({"steps": 0}, "steps must be a whole number"),
        ({"max_steps": 0}, "max_steps must be a whole number"),
        ({"until": float("nan")}, "times must be finite"),
    ],
)
def test_rejects_invalid_settings_at_construction(settings: dict[str, object], message: str) -> None:
    with pytest.raises(WiringError, match=message):
        ContinuousGraph(4, inputs=2, outputs=1, **settings)  # type: ignore[arg-type]


def test_prints_as_a_constructor_call() -> None:
    graph = ContinuousGraph(9, inputs=2, outputs=2, edges=12, rtol=1e-4, adjoint=True)
    text = "ContinuousGraph(nodes=9, inputs=2, outputs=2, edges=12, solver='dopri5', "
    assert repr(graph) == text + "rtol=0.0001, atol=0.001, adjoint=True)"
    fixed = ContinuousGraph(9, inputs=2, outputs=2, solver="rk4", steps=4, until=2.0)
    assert repr(fixed) == "ContinuousGraph(nodes=9, inputs=2, outputs=2, solver='rk4', steps=4, until=2.0)"
    for one in (graph, fixed):
        assert repr(eval(repr(one), {"ContinuousGraph": ContinuousGraph})) == repr(one)
