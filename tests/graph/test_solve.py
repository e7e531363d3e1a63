"""The solvers, compared with exact solutions and torchdiffeq; gradients, and failures that must not be silent."""

import dataclasses
import inspect
import itertools
import math
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.graph.adjoint import solve_adjoint
from wirings.graph.solve import METHODS, Solution, SolverOptions, combine, solve

ADAPTIVE = [name for name, tableau in METHODS.items() if tableau.error]
each_method = pytest.mark.parametrize("method", METHODS)
each_adaptive = pytest.mark.parametrize("method", ADAPTIVE)
both_solvers = pytest.mark.parametrize("adjoint", [False, True], ids=["steps", "adjoint"])


def system(dtype: torch.dtype = torch.float64, n: int = 5) -> tuple[Tensor, Tensor]:
    """A matrix of norm 1.2, with growth and rotation, and a start."""
    matrix = torch.randn(n, n, dtype=dtype)
    return 1.2 * matrix / torch.linalg.matrix_norm(matrix, 2), torch.randn(n, 3, dtype=dtype)


def linear(matrix: Tensor) -> Callable[[float, Tensor], Tensor]:
    return lambda t, y: matrix @ y


class Watched:
    """A function that records the times at which it is called."""

    def __init__(self, f: Callable[[float, Tensor], Tensor]) -> None:
        self.f, self.times = f, list[float]()

    def __call__(self, t: float, y: Tensor) -> Tensor:
        self.times.append(t)
        return self.f(t, y)


@pytest.mark.parametrize("function", [solve, solve_adjoint])
def test_signatures_name_all_options(function: Callable[..., Solution]) -> None:
    """So that type checkers find misspelt options."""
    parameters = inspect.signature(function).parameters
    assert {field.name for field in dataclasses.fields(SolverOptions)} <= set(parameters)
    assert all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def either(adjoint: bool, f: Any, y: Tensor, t0: float, t1: float, parameters: Any = (), **options: Any) -> Solution:
    return solve_adjoint(f, y, t0, t1, parameters, **options) if adjoint else solve(f, y, t0, t1, **options)


# ---- accuracy --------------------------------------------------------------------------------------------------------


@each_method
def test_tableau_meets_its_order_conditions(method: str) -> None:
    """All conditions up to order 4, for the weights and for the formula that the error is measured against."""
    tableau = METHODS[method]
    stages = len(tableau.weights) + bool(tableau.error)
    a, b = torch.zeros(stages, stages, dtype=torch.float64), torch.zeros(stages, dtype=torch.float64)
    rows = [(), *tableau.rows, *([tableau.weights] if tableau.error else [])]
    for i, row in enumerate(rows):
        a[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    b[: len(tableau.weights)] = torch.tensor(tableau.weights)
    nodes = [0.0, *tableau.nodes, *([1.0] if tableau.error else [])]
    c = a.sum(1)
    torch.testing.assert_close(c, torch.tensor(nodes, dtype=torch.float64))
    trees = [
        (1, torch.ones_like(c), 1), (2, c, 1 / 2), (3, c**2, 1 / 3), (3, a @ c, 1 / 6), (4, c**3, 1 / 4),
        (4, c * (a @ c), 1 / 8), (4, a @ c**2, 1 / 12), (4, a @ a @ c, 1 / 24),
    ]  # fmt: skip
    for order, tree, value in trees:
        if order <= tableau.order:
            assert (b @ tree).item() == pytest.approx(value, abs=1e-7)
        if tableau.error and order < tableau.order:
            assert (torch.tensor(tableau.error, dtype=torch.float64) @ tree).item() == pytest.approx(0, abs=1e-15)


@each_method
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.float64, 1e-5)])
def test_linear_system(method: str, dtype: torch.dtype, bound: float) -> None:
    matrix, y = system(dtype)
    steps = {"euler": 5000, "midpoint": 500, "rk4": 50}.get(method)
    bound = 1e-2 if method == "euler" else bound
    solution = solve(linear(matrix), y, 0.0, 1.5, method=method, steps=steps, rtol=1e-6, atol=1e-6)
    assert solution.y.dtype == dtype
    torch.testing.assert_close(solution.y, torch.linalg.matrix_exp(1.5 * matrix) @ y, rtol=bound, atol=bound)


@each_method
def test_order_of_convergence(method: str) -> None:
    """Halving the step divides the error by 2^order."""

    def f(t: float, y: Tensor) -> Tensor:  # y = 1 / (1 + t^2), neither linear nor autonomous
        return -2 * t * y**2

    y, exact = torch.ones(2, dtype=torch.float64), 0.5
    errors = [(solve(f, y, 0.0, 1.0, method=method, steps=n).y[0].item() - exact) for n in (32, 64, 128)]
    for coarse, fine in itertools.pairwise(errors):
        assert math.log2(abs(coarse / fine)) == pytest.approx(METHODS[method].order, abs=0.35)


@each_adaptive
def test_error_follows_tolerance(method: str) -> None:
    matrix, y = system()
    exact = torch.linalg.matrix_exp(2 * matrix) @ y
    errors, evaluations = [], []
    for tolerance in (1e-3, 1e-5, 1e-7, 1e-9):
        solution = solve(linear(matrix), y, 0.0, 2.0, method=method, rtol=tolerance, atol=tolerance, max_steps=10_000)
        errors.append(((solution.y - exact) / (1 + exact.abs())).square().mean().sqrt().item() / tolerance)
        evaluations.append(solution.evaluations)
    assert max(errors) < 20  # the tolerance is for one step; the steps add up
    assert all(a * 100 > 3 * b for a, b in itertools.pairwise(errors))  # about a hundredth
    assert evaluations == sorted(set(evaluations))


def test_either_tolerance_counts() -> None:
    """A large state is held to rtol, a small one to atol."""
    for size, decisive, idle in ((1e6, "rtol", "atol"), (1e-6, "atol", "rtol")):
        y = torch.full((3,), size, dtype=torch.float64)

        def evaluations(size: float = size, y: Tensor = y, **tolerance: float) -> int:
            return solve(lambda t, x: 5 * x * math.sin(9 * t), y, 0.0, 2.0, **tolerance).evaluations

        base = {"rtol": 1e-4, "atol": 1e-4 if size > 1 else 1e-2 * size}
        tight = {name: value * 1e-3 for name, value in base.items()}
        assert evaluations(**base | {decisive: tight[decisive]}) > 1.5 * evaluations(**base)
        assert evaluations(**base | {idle: tight[idle]}) <= 1.2 * evaluations(**base)


@each_method
def test_solving_backwards_returns_to_the_start(method: str) -> None:
    matrix, y = system()
    options: dict[str, Any] = {"method": method, "rtol": 1e-9, "atol": 1e-9}
    options |= {"steps": 400} if method not in ADAPTIVE else {}
    there = solve(linear(matrix), y, 0.5, 1.5, **options).y
    back = solve(linear(matrix), there, 1.5, 0.5, **options).y
    assert (there - y).abs().max() > 0.1
    torch.testing.assert_close(back, y, rtol=0, atol=0.05 if method == "euler" else 1e-4)


@each_method
def test_time_reaches_f_and_ends_exactly(method: str) -> None:
    """For y' = cos t; f is never evaluated beyond the final time."""
    y, steps = torch.zeros(2, 2, dtype=torch.float64), None if method in ADAPTIVE else 7
    f = Watched(lambda t, y: torch.full_like(y, math.cos(t)))
    solution = solve(f, y, 0.1, 0.8, method=method, steps=steps, rtol=1e-8, atol=1e-8)
    assert solution.y[0, 0].item() == pytest.approx(math.sin(0.8) - math.sin(0.1), abs=0.1 if steps else 1e-7)
    assert all(isinstance(t, float) and 0.1 <= t <= 0.8 for t in f.times)
    if method in ADAPTIVE:
        assert f.times[-1] == 0.8
    assert len(f.times) == solution.evaluations


@both_solvers
def test_empty_time_interval_returns_the_state(adjoint: bool) -> None:
    y = torch.randn(3)
    solution = either(adjoint, linear(torch.eye(3)), y, 0.7, 0.7)
    assert solution.y is y
    assert (solution.evaluations, solution.accepted, solution.rejected) == (0, 0, 0)


@each_method
def test_counts_of_equal_steps(method: str) -> None:
    """No stage is wasted: the one for the error estimate is left out."""
    matrix, y = system()
    solution = solve(linear(matrix), y, 0.0, 1.0, method=method, steps=3)
    stages = {"euler": 1, "midpoint": 2, "rk4": 4, "bosh3": 3, "dopri5": 6}[method]
    assert (solution.evaluations, solution.accepted, solution.rejected) == (3 * stages, 3, 0)


@pytest.mark.parametrize(("method", "stages"), [("dopri5", 6), ("bosh3", 3)])
def test_rejected_steps_are_counted_and_leave_the_result_right(method: str, stages: int) -> None:
    """Nothing happens until a sharp pulse at t = 1, which a long step must miss at first."""

    def pulse(t: float, y: Tensor) -> Tensor:
        return torch.full_like(y, math.exp(-0.5 * ((t - 1) / 0.02) ** 2))

    f, y = Watched(pulse), torch.zeros(4, dtype=torch.float64)
    solution = solve(f, y, 0.0, 1.02, method=method, rtol=1e-7, atol=1e-7)
    exact = 0.02 * math.sqrt(math.pi / 2) * (1 + math.erf(1 / math.sqrt(2)))
    assert solution.y[0].item() == pytest.approx(exact, abs=1e-6)
    assert solution.rejected > 0
    # Two for the first step size, of which one is the first stage; then each step, accepted or not, reuses its first.
    assert solution.evaluations == len(f.times) == 2 + stages * (solution.accepted + solution.rejected)


def test_step_sizes() -> None:
    """Steps grow at most tenfold, shrink at most to a fifth, and do not grow right after a rejection."""
    f = Watched(lambda t, y: torch.full_like(y, math.nan if len(f.times) == 17 else 1.0))  # once, in the third step
    solution = solve(f, torch.zeros(4, dtype=torch.float64), 0.0, 2.0)
    assert solution.rejected == 1
    assert f.times[-1] == 2.0
    sizes = [(f.times[i + 5] - f.times[i]) / 0.8 for i in range(2, len(f.times), 6)]  # the stages at h / 5 and h
    factors = [b / a for a, b in itertools.pairwise(sizes)]
    assert factors[:5] == pytest.approx([10, 10, 0.2, 1, 10])
    assert sum(sizes[:2] + sizes[3:]) == pytest.approx(2.0)
    torch.testing.assert_close(solution.y, torch.full_like(solution.y, 2.0))


def test_rejected_steps_leave_no_graph() -> None:
    """The autograd graph of a rejected step is freed before the next step."""
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    nodes: list[weakref.ref[Any]] = []
    alive: list[int] = []

    class Token:
        pass

    class Traced(torch.autograd.Function):
        """Leaves a mark for as long as its node of the graph lives."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.token = Token()
            nodes.append(weakref.ref(ctx.token))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    def f(t: float, y: Tensor) -> Tensor:
        alive.append(sum(node() is not None for node in nodes))
        return Traced.apply(scale * math.exp(-0.5 * ((t - 0.9) / 0.02) ** 2) + 0 * y)

    solution = solve(f, torch.zeros(2, dtype=torch.float64), 0.0, 1.0, rtol=1e-5, atol=1e-5)
    assert solution.rejected > 2
    tries = [alive[i : i + 6] for i in range(2, len(alive), 6)]
    assert len(tries) == solution.accepted + solution.rejected
    assert all(one == list(range(one[0], one[0] + 6)) for one in tries)  # each adds its own, and nothing is freed late
    assert sorted({one[0] for one in tries}) == [1 + 6 * i for i in range(solution.accepted)]
    solution.y.sum().backward()
    assert scale.grad is not None


@each_method
def test_state_keeps_its_dtype(method: str) -> None:
    """A function in bfloat16 (as under autocast) or in float64 leaves a float32 state in float32."""
    y = torch.randn(64)
    steps = None if method in ADAPTIVE else 40
    exact = y * math.exp(-1)
    for dtype, bound in ((torch.bfloat16, 2e-2), (torch.float64, 2e-2)):
        seen = set()

        def f(t: float, y: Tensor, dtype: torch.dtype = dtype, seen: set[torch.dtype] = seen) -> Tensor:
            seen.add(y.dtype)
            return -y.to(dtype)

        solution = solve(f, y, 0.0, 1.0, method=method, steps=steps)
        assert solution.y.dtype == torch.float32
        assert seen == {torch.float32}
        torch.testing.assert_close(solution.y, exact, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_in_half_precision(dtype: torch.dtype) -> None:
    y = torch.randn(20_000).to(dtype)  # so many that the sum of squares would overflow float16
    solution = solve(lambda t, y: -y, y, 0.0, 1.0, rtol=1e-2, atol=1e-2)
    assert solution.y.dtype == dtype
    torch.testing.assert_close(solution.y.float(), y.float() * math.exp(-1), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 4), (0, 3)])
@both_solvers
def test_any_shape(shape: tuple[int, ...], adjoint: bool) -> None:
    y = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for options in ({"rtol": 1e-8, "atol": 1e-8}, {"method": "rk4", "steps": 20}):
        out = either(adjoint, lambda t, y: -y, y, 0.0, 1.0, **options).y
        torch.testing.assert_close(out, y * math.exp(-1), rtol=1e-5, atol=1e-5)
        (grad,) = torch.autograd.grad(out.sum(), y)
        torch.testing.assert_close(grad, torch.full_like(y, math.exp(-1)), rtol=1e-5, atol=1e-5)


def test_combine() -> None:
    y, *ks = torch.randn(4, 3, 2).unbind()
    nan = torch.full_like(y, math.nan)
    before = [x.clone() for x in (y, *ks)]
    torch.testing.assert_close(combine(y, [*ks, nan], [0.5, 2.0, -1.0, 0.0]), y + 0.5 * ks[0] + 2 * ks[1] - ks[2])
    torch.testing.assert_close(combine(None, [nan, *ks], [0.0, 0.5, 2.0, -1.0]), 0.5 * ks[0] + 2 * ks[1] - ks[2])
    assert combine(None, [ks[0].bfloat16()], [1.0]).dtype == torch.float32
    assert combine(y, ks[:1], [0.0]) is y
    assert all(torch.equal(a, b) for a, b in zip(before, (y, *ks), strict=True))
    inputs = [x.double().requires_grad_() for x in (y, *ks)]
    assert torch.autograd.gradcheck(lambda y, *ks: combine(y, ks, [0.5, 0.0, -1.0]), inputs)


# ---- against torchdiffeq ---------------------------------------------------------------------------------------------


@each_adaptive
@pytest.mark.parametrize("tolerance", [1e-3, 1e-6])
def test_agrees_with_torchdiffeq(method: str, tolerance: float) -> None:
    """Within the tolerance of torchdiffeq's most accurate solution, in about as many evaluations."""
    torchdiffeq = pytest.importorskip("torchdiffeq")
    matrix, start = system()
    times = torch.tensor([0.0, 2.0], dtype=torch.float64)
    problems = {
        "linear": (linear(matrix), start),
        "tanh": (lambda t, y: torch.tanh(matrix @ y), start),
        "forced": (lambda t, y: -3 * y + math.sin(20 * float(t)), start),
    }
    options = {"method": method, "rtol": tolerance, "atol": tolerance}
    for f, y in problems.values():
        theirs = Watched(f)
        torchdiffeq.odeint(theirs, y, times, **options)
        best = torchdiffeq.odeint(f, y, times, method="dopri5", rtol=1e-11, atol=1e-11)[-1]
        solution = solve(f, y, 0.0, 2.0, **options)
        assert ((solution.y - best) / (1 + best.abs())).square().mean().sqrt() < 20 * tolerance
        assert solution.evaluations <= 1.1 * len(theirs.times) + 12


@pytest.mark.parametrize("method", ["euler", "midpoint"])
def test_equal_steps_agree_with_torchdiffeq(method: str) -> None:
    """(Its rk4 is another formula of order 4.)"""
    torchdiffeq = pytest.importorskip("torchdiffeq")
    matrix, y = system()
    times = torch.linspace(0, 2, 9, dtype=torch.float64)
    expected = torchdiffeq.odeint(linear(matrix), y, times, method=method)[-1]
    torch.testing.assert_close(solve(linear(matrix), y, 0.0, 2.0, method=method, steps=8).y, expected)


# ---- gradients -------------------------------------------------------------------------------------------------------


@each_method
def test_gradcheck_of_equal_steps(method: str) -> None:
    matrix, y = system(n=3)

    def end(matrix: Tensor, y: Tensor) -> Tensor:
        return solve(lambda t, y: torch.tanh(matrix @ y) * (1 + t), y, 0.0, 1.0, method=method, steps=3).y

    assert torch.autograd.gradcheck(end, (matrix.requires_grad_(), y.requires_grad_()))


@both_solvers
@each_adaptive
def test_gradient_of_the_linear_system(method: str, adjoint: bool) -> None:
    """Compare with the gradient through the matrix exponential; a tighter tolerance gives a smaller difference."""
    matrix, y = (x.requires_grad_() for x in system())
    target = torch.randn_like(y)
    exact = torch.autograd.grad((torch.linalg.matrix_exp(1.5 * matrix) @ y * target).sum(), (matrix, y))
    differences = []
    for tolerance in (1e-3, 1e-5, 1e-7):
        options = {"method": method, "rtol": tolerance, "atol": tolerance}
        out = either(adjoint, linear(matrix), y, 0.0, 1.5, [matrix], **options).y
        grads = torch.autograd.grad((out * target).sum(), (matrix, y))
        differences.append(max((a - b).norm().item() / b.norm().item() for a, b in zip(grads, exact, strict=True)))
        assert differences[-1] < 50 * tolerance
    assert differences[0] > 30 * differences[2]


@pytest.mark.parametrize("options", [{}, {"method": "rk4", "steps": 30}, {"method": "bosh3", "steps": 60}])
def test_adjoint_agrees_with_the_gradient_of_the_steps(options: dict[str, Any]) -> None:
    """A function of time with several parameters, one unused and one without a gradient, of odd shapes."""
    matrix, y = (x.requires_grad_() for x in system())
    bias, idle = (torch.randn(5, 1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    fixed = torch.randn(5, 1, dtype=torch.float64)

    def f(t: float, y: Tensor) -> Tensor:
        return torch.tanh(matrix @ y + bias * math.cos(t) + fixed)

    options = {"rtol": 1e-9, "atol": 1e-9} | options
    inputs, parameters = (y, matrix, bias, idle), [idle, matrix, fixed, bias, matrix]
    back: list[Solution] = []
    direct = solve(f, y, 0.0, 1.0, **options)
    adjoint = solve_adjoint(f, y, 0.0, 1.0, parameters, report=back.append, **options)
    torch.testing.assert_close(adjoint.y, direct.y, rtol=0, atol=0)
    assert (adjoint.evaluations, adjoint.accepted) == (direct.evaluations, direct.accepted)
    assert not back
    expected = torch.autograd.grad(direct.y.square().sum(), inputs, allow_unused=True)
    grads = torch.autograd.grad(adjoint.y.square().sum(), inputs)
    for grad, value, x in zip(grads, expected, inputs, strict=True):
        value = torch.zeros_like(x) if value is None else value
        torch.testing.assert_close(grad, value, rtol=1e-6, atol=1e-6)
    (report,) = back
    assert report.evaluations > 0
    assert report.accepted > 0
    torch.testing.assert_close(report.y, y.detach(), rtol=1e-6, atol=1e-6)


def test_adjoint_controls_the_error_of_every_part() -> None:
    """The state rests at 0, where any step would do; only its gradient, or only the parameter's, moves."""
    y, weight = (torch.zeros(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    options = {"rtol": 1e-6, "atol": 1e-6}
    out = solve_adjoint(lambda t, y: torch.sin(y) * 50 * math.cos(20 * t), y, 0.0, 1.0, [], **options).y
    (grad,) = torch.autograd.grad(out.sum(), y)
    torch.testing.assert_close(grad, torch.full_like(y, math.exp(2.5 * math.sin(20))), rtol=1e-4, atol=1e-4)
    out = solve_adjoint(lambda t, y: weight * 50 * math.cos(20 * t), y, 0.0, 1.0, [weight], **options).y
    (grad,) = torch.autograd.grad(out.sum(), weight)
    torch.testing.assert_close(grad, torch.full_like(y, 2.5 * math.sin(20)), rtol=1e-4, atol=1e-4)


def test_adjoint_of_non_leaf_tensors() -> None:
    weight, y = (x.requires_grad_() for x in system())

    def end(adjoint: bool) -> Tensor:
        used = torch.sin(weight) * 0.5
        start = 2 * y
        return either(adjoint, linear(used), start, 0.0, 1.0, [used], rtol=1e-9, atol=1e-9).y

    expected, grads = (torch.autograd.grad(end(a).square().sum(), (weight, y)) for a in (False, True))
    torch.testing.assert_close(grads, expected, rtol=1e-6, atol=1e-6)


def test_adjoint_of_a_function_without_gradient() -> None:
    y = torch.randn(3, requires_grad=True)
    out = solve_adjoint(lambda t, y: torch.full_like(y, t), y, 0.0, 1.0, []).y
    torch.testing.assert_close(out, y + 0.5)
    out.sum().backward()
    torch.testing.assert_close(y.grad, torch.ones(3))


def test_adjoint_memory_does_not_grow_with_the_steps() -> None:
    matrix, y = (x.requires_grad_() for x in system())

    def saved(adjoint: bool, steps: int) -> int:
        count = 0

        def pack(x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            either(adjoint, linear(matrix), y, 0.0, 1.0, [matrix], method="rk4", steps=steps)
        return count

    assert saved(True, 5) == saved(True, 50) == 2  # the final state, and the parameter
    assert saved(False, 50) == 10 * saved(False, 5)


def test_adjoint_uses_the_autocast_of_the_forward_pass() -> None:
    """It also leaves no cached cast without a gradient outside."""
    weight, y = torch.nn.Parameter(torch.randn(8, 8) * 0.3), torch.randn(4, 8)
    seen: list[torch.dtype] = []

    def f(t: float, y: Tensor) -> Tensor:
        seen.append((y @ weight).dtype)
        return torch.tanh(y @ weight)

    for enabled, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = solve_adjoint(f, y, 0.0, 1.0, [weight], method="rk4", steps=4).y
            assert (y @ weight).requires_grad
        assert out.dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16, enabled=not enabled):
            (grad,) = torch.autograd.grad(out.square().sum(), weight)
        assert set(seen) == {dtype}
        seen.clear()
        expected = solve(lambda t, y: torch.tanh(y @ weight), y, 0.0, 1.0, method="rk4", steps=4).y
        (expected,) = torch.autograd.grad(expected.square().sum(), weight)
        torch.testing.assert_close(grad, expected, rtol=0.05, atol=0.1 if enabled else 5e-3)


def test_no_gradient_flows_through_the_error_estimate() -> None:
    """The gradient of adaptive steps equals that of the same steps given: one dopri5 step over a short time."""
    matrix, y = (x.requires_grad_() for x in system())
    grads = []
    for options in ({"rtol": 1.0, "atol": 1.0}, {"steps": 1}):
        solution = solve(linear(matrix), y, 0.0, 0.05, **options)
        assert solution.accepted == 1
        grads.append(torch.autograd.grad(solution.y.square().sum(), (matrix, y)))
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_equal_steps_compile_without_graph_breaks() -> None:
    matrix, y = (x.requires_grad_() for x in system(torch.float32))

    def end(matrix: Tensor, y: Tensor) -> Tensor:
        return solve(linear(matrix), y, 0.0, 1.0, method="midpoint", steps=2).y

    compiled = torch.compile(end, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(matrix, y), end(matrix, y))
    expected, grads = (torch.autograd.grad(g(matrix, y).sum(), (matrix, y)) for g in (end, compiled))
    torch.testing.assert_close(grads, expected)
    batch = torch.randn(3, *y.shape)
    several = torch.vmap(end, in_dims=(None, 0))(matrix, batch)
    torch.testing.assert_close(several, torch.stack([end(matrix, one) for one in batch]))


# ---- failures --------------------------------------------------------------------------------------------------------


@each_adaptive
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@both_solvers
def test_blow_up(method: str, dtype: torch.dtype, adjoint: bool) -> None:
    """The solution of y' = y^2 from 1 diverges at t = 1."""
    with pytest.raises(WiringError, match=r"^ContinuousGraph: the step size became too small") as caught:
        either(adjoint, lambda t, y: y**2, torch.ones(3, dtype=dtype), 0.0, 2.0, method=method, where="ContinuousGraph")
    reached = re.search(r"to t = ([\d.]+), on the way to 2", str(caught.value))
    assert reached is not None
    assert float(reached[1]) == pytest.approx(1, abs=0.01)
    for part in ("rtol=0.001 and atol=0.001", "rejected", "step size is", "looser", "max_steps", "norm"):
        assert part in str(caught.value)


def test_nan_raises() -> None:
    with pytest.raises(WiringError, match=r"^the solver: .*not finite beyond.* to t = 0\.5, on the way to 1"):
        solve(lambda t, y: -y if t <= 0.5 else y * math.nan, torch.ones(3), 0.0, 1.0)


def test_overflow_of_a_bounded_function_is_not_accepted() -> None:
    """The state overflows although dy/dt stays finite, so that the scaled error there is 0."""
    for options in ({}, {"steps": 3}):
        with pytest.raises(WiringError, match="not finite"):
            solve(lambda t, y: torch.full_like(y, 3e38), torch.full((3,), 3e38), 0.0, 1.0, **options)


@each_method
def test_overflow_in_equal_steps(method: str) -> None:
    with pytest.raises(WiringError, match=r"^Graph: the state is not finite at the end.*Try more steps"):
        solve(lambda t, y: y**2, torch.full((2,), 9.0), 0.0, 9.0, method=method, steps=9, where="Graph")


def test_rejects_initial_states_that_are_not_finite() -> None:
    with pytest.raises(WiringError, match=r"^G: the initial state.*is not finite"):
        solve(lambda t, y: -y, torch.tensor([1.0, math.inf]), 0.0, 1.0, where="G")
    with pytest.raises(WiringError, match=r"^G: the first dy/dt.*is not finite, although the state is finite"):
        solve(lambda t, y: y / 0, torch.ones(2), 0.0, 1.0, where="G")
    with pytest.raises(WiringError, match=r"^G: the first dy/dt.*is too large"):
        solve(lambda t, y: y * 1e38, torch.ones(2), 0.0, 1.0, where="G")


def test_recovers_from_a_step_that_is_not_finite() -> None:
    """Too long a step takes the root of a negative number; shorter ones succeed."""
    broken = 0

    def f(t: float, y: Tensor) -> Tensor:
        nonlocal broken
        dy = -60 * y.sqrt() ** 2
        broken += int(dy.isnan().any())
        return dy

    solution = solve(f, torch.ones(3, dtype=torch.float64), 0.0, 1.0, rtol=1e-2, atol=1e-2)
    assert broken > 0
    assert solution.rejected > 0
    assert solution.y.abs().max() < 1e-2


def test_step_limit() -> None:
    matrix, y = system()
    options = {"rtol": 1e-8, "atol": 1e-8}
    needed = solve(linear(matrix), y, 0.0, 2.0, **options)
    tried = needed.accepted + needed.rejected
    assert solve(linear(matrix), y, 0.0, 2.0, max_steps=tried, **options).evaluations == needed.evaluations
    with pytest.raises(WiringError, match=rf"not done after max_steps={tried - 1} steps.*in \d+ steps with rtol=1e-08"):
        solve(linear(matrix), y, 0.0, 2.0, max_steps=tried - 1, **options)


def test_failure_of_the_adjoint_names_it() -> None:
    y = torch.ones(2, requires_grad=True)
    broken = False

    def f(t: float, y: Tensor) -> Tensor:
        return y * math.nan if broken else -y

    out = solve_adjoint(f, y, 0.0, 1.0, [], where="G").y
    broken = True
    with pytest.raises(WiringError, match=r"^G \(the gradient, by the adjoint equation\): the first dy/dt, at t = 1"):
        out.sum().backward()


@both_solvers
def test_wrong_shape(adjoint: bool) -> None:
    y = torch.ones(3, 2, requires_grad=True)
    with pytest.raises(WiringError, match=r"^G: dy/dt must have the state's shape \(3, 2\), got \(3,\)"):
        either(adjoint, lambda t, y: y.sum(1), y, 0.0, 1.0, where="G")


@both_solvers
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "dopri"}, "unknown solver 'dopri'. Did you mean 'dopri5'"),
        ({"method": "euler"}, "^G: 'euler' has no error estimate .*steps=.* or use 'bosh3' or 'dopri5'"),
        ({"rtol": 0.0}, "^G: rtol must be positive and finite, got 0.0"),
        ({"rtol": math.inf}, "rtol"),
        ({"atol": -1e-3}, "^G: atol must be positive and finite"),
        ({"atol": math.nan}, "atol"),
        ({"steps": 0}, "^G: steps must be a whole number, at least 1, got 0"),
        ({"steps": 2.5}, "^G: steps must be a whole number, at least 1, got 2.5"),
        ({"steps": True}, "steps"),
        ({"max_steps": 0}, "^G: max_steps must be a whole number, at least 1, got 0"),
        ({"max_steps": 1e3}, "max_steps"),
        ({"t1": math.inf}, "^G: the times must be finite, got 0.0 to inf"),
        ({"y": torch.ones(3, dtype=torch.int64)}, "^G: the state must have a real floating-point dtype"),
    ],
)
def test_rejects_invalid_options(adjoint: bool, options: dict[str, Any], message: str) -> None:
    options = {"y": torch.ones(3), "t0": 0.0, "t1": 1.0, "where": "G"} | options
    with pytest.raises(WiringError, match=message):
        either(adjoint, lambda t, y: -y, **options)
