"""CUDA: no host synchronization, CUDA graphs, torch.compile, and the same wirings as on a CPU."""

import copy
from contextlib import nullcontext

import pytest
import torch
from kernels import without_waiting
from torch import nn

import wirings
from wirings import rules

pytestmark = pytest.mark.gpu


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, groups=4),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def wire(model: nn.Module, rule: str, density: object = 0.1) -> wirings.Wiring:
    # Compiled code draws other random numbers than eager code. With rho = 1 they make no difference.
    made = rules.get(rule, **({"rho": 1.0} if rule == "targeted_dropout" else {}))
    wiring = wirings.wire_(model, made, density=None if made.own_budget else density)
    wiring.plan(10)
    return wiring


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1000,), (300, 500), (64, 32, 3, 3), (1200, 1000)], ids=str)
def test_choose_matches_the_cpu(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape).to(dtype)
    allowed = torch.rand(shape) < 0.5
    for layout in (torch.contiguous_format, torch.channels_last) if len(shape) == 4 else (torch.contiguous_format,):
        weight = weight.contiguous(memory_format=layout)
        for k in (0, 1, weight.numel() // 10, weight.numel() // 3):
            for mask in (None, allowed):
                there = wirings.choose(weight.cuda(), k, None if mask is None else mask.cuda())
                assert torch.equal(there.cpu(), wirings.choose(weight, k, mask))
                kept = wirings.real_edges(weight.cuda(), k, None if mask is None else mask.cuda())
                assert torch.equal(kept.cpu(), wirings.real_edges(weight, k, mask))
                assert kept.stride() == weight.stride()


@pytest.mark.parametrize("share", ["uniform", "global"])
@pytest.mark.parametrize("rule", [*rules.names(), rules.TargetedDropout("gamma", regular=True)], ids=str)
def test_training_step_does_not_synchronize(rule: str | rules.Rule, share: str) -> None:
    made = rules.get(rule)
    if made.own_budget and share == "global":
        pytest.skip("the rule takes no budget")
    model = network().cuda()
    budget = {} if made.own_budget else {"density": wirings.LinearSchedule(0.5, 0.1, steps=5), "share": share}
    wiring = wirings.wire_(model, made, **budget)
    wiring.plan(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(8, 3, 8, 8, device="cuda"), torch.randint(10, (8,), device="cuda")
    for step in range(4):
        # The first step allocates memory and compiles kernels, so it may synchronize.
        with without_waiting() if step == 1 else nullcontext():
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        wiring.step(optimizer)
    assert torch.isfinite(loss)


@pytest.mark.parametrize("structure", ["1:2", "8x2, padded", "row", "column"])
@pytest.mark.parametrize("rule", ["dnw", "soft_threshold", "top_kast", "decayed_gradient", "random"])
def test_structures_choose_as_on_the_cpu_and_do_not_synchronize(rule: str, structure: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
    with torch.no_grad():
        for weight in (model[0].weight, model[3].weight):
            weight.copy_(torch.randint(-8, 9, weight.shape))  # sums of squares are exact, in any order
    budget = {} if ":" in structure else {"density": 0.25}
    there = copy.deepcopy(model).cuda()
    made = {"seed": 1} if rule == "random" else {}
    ours, theirs = (wirings.wire_(m, rules.get(rule, **made), structure=structure, **budget) for m in (model, there))
    for name, mask in ours.masks().items():
        assert torch.equal(theirs.masks()[name].cpu(), mask)
    theirs.plan(4)
    optimizer = torch.optim.SGD(there.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(8, 4, 8, 8, device="cuda")
    for step in range(3):
        with without_waiting() if step == 2 else nullcontext():
            loss = there(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        theirs.step(optimizer)
    assert torch.isfinite(loss)


def test_captured_step_follows_the_schedule() -> None:
    model = network().cuda()
    wiring = wire(model, "dnw", wirings.LinearSchedule(0.5, 0.1, steps=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(8, 3, 8, 8, device="cuda"), torch.randint(10, (8,), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
        used = [module.weight.count_nonzero() for module in model if hasattr(module, "parametrizations")]
    sizes = [layer.weight.numel() for layer in wiring.layers]
    for t in range(5):
        graph.replay()
        density = max(0.5 - 0.1 * t, 0.1)
        assert [int(count) for count in used] == [int(density * size + 1e-6) for size in sizes], t
        wiring.step()


@pytest.mark.parametrize(
    "rule",
    [
        rules.DecayedGradient(),
        rules.GMP(every=1),
        rules.L1Anneal(0.1, every=1),
        rules.RigL(every=2),
        rules.SET(every=2, seed=0),
        rules.SparseMomentum(every=2),
        rules.STR(),
        rules.TargetedDropout(1.0, regular=True),
        rules.TopKAST(exploration=0.1),
        rules.get("soft_threshold", schedule={"kind": "linear", "start": 0.2}),
    ],
    ids=lambda rule: rule.name,
)
def test_rules_acting_between_captured_steps(rule: rules.Rule) -> None:
    """Training with a captured step (and the learning rate in a tensor) gives the same wirings as eager training."""
    made = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = network().cuda()
        wiring = wirings.wire_(model, copy.deepcopy(rule), density=0.1)
        wiring.plan(6)
        rate = torch.tensor(0.1, device="cuda") if captured else 0.1
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=True)
        made.append((model, wiring, optimizer))
    made[1][0].load_state_dict(made[0][0].state_dict())
    x, y = torch.randn(8, 3, 8, 8, device="cuda"), torch.randint(10, (8,), device="cuda")

    def step(model: nn.Module, wiring: wirings.Wiring, optimizer: torch.optim.SGD) -> None:
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    model, _, optimizer = made[1]
    before = copy.deepcopy(model.state_dict())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(*made[1])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*made[1])
    model.load_state_dict(before)
    for state in optimizer.state.values():
        state["momentum_buffer"].zero_()
    for _ in range(6):
        step(*made[0])
        graph.replay()
        for _, wiring, optimizer in made:
            wiring.step(optimizer)
        for a, b in zip(made[0][1].masks().values(), made[1][1].masks().values(), strict=True):
            assert (a != b).sum() <= 0.05 * a.sum() + 2, "only a few edges may differ, by the order of sums"
        for a, b in zip(made[0][0].parameters(), made[1][0].parameters(), strict=True):
            assert (a - b).abs().mean() < 1e-3


def test_targeted_dropout_ranks_nodes_like_the_cpu() -> None:
    model = network()
    here = wirings.wire_(model, rules.TargetedDropout(regular=True), density=0.13)
    there = wirings.wire_(network().cuda(), rules.TargetedDropout(regular=True), density=0.13)
    there.model.load_state_dict(model.state_dict())
    for a, b in zip(here.masks().values(), there.masks().values(), strict=True):
        assert torch.equal(a, b.cpu())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("rule", rules.names())
@pytest.mark.filterwarnings("default")
def test_compiled_training_matches_eager(rule: str, mode: str) -> None:
    torch._dynamo.reset()
    model = network().cuda()
    wire(model, rule)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, mode=mode)
    x, y = torch.randn(8, 3, 8, 8, device="cuda"), torch.randint(10, (8,), device="cuda")
    losses = []
    for one in (model, compiled):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.01, momentum=0.9)
        taken = []
        for _ in range(5):
            loss = nn.functional.cross_entropy(one(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            taken.append(loss.item())
        losses.append(taken)
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single:UserWarning")  # parametrized weights
def test_wired_models_and_checkpoints_move_between_devices() -> None:
    model = network()
    wiring = wire(model, "random")
    masks = {name: mask.clone() for name, mask in wiring.masks().items()}
    model.cuda()
    assert all(torch.equal(mask.cpu(), masks[name]) for name, mask in wiring.masks().items())
    there = network().cuda()
    again = wire(there, "random")
    there.load_state_dict(model.cpu().state_dict())
    assert all(torch.equal(mask.cpu(), masks[name]) for name, mask in again.masks().items())
    lstm = nn.LSTM(8, 16, 2).cuda()
    wirings.wire_(lstm, density=0.2)
    out, _ = lstm(torch.randn(3, 2, 8, device="cuda"))
    out.sum().backward()
    finalized = wirings.finalize_(copy.deepcopy(lstm))
    x = torch.randn(3, 2, 8, device="cuda")
    torch.testing.assert_close(finalized(x)[0], lstm(x)[0])


@pytest.mark.parametrize("rule", ["dnw", "soft_threshold", "str"])
def test_mixed_precision(rule: str) -> None:
    model = network().cuda()
    wiring = wire(model, rule)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler()
    x, y = torch.randn(8, 3, 8, 8, device="cuda"), torch.randint(10, (8,), device="cuda")
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype=dtype):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(report.edges == max(1, int(0.1 * report.possible)) for report in wiring.look())
