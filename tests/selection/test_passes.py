"""Weights that are made for all layers at once: everything that may happen in and around a forward pass."""

import copy
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import wirings
from wirings import rules
from wirings.selection import batched, passes

AT_ONCE = [name for name in rules.names() if rules.get(name).kept_at_once is not None]


class Tower(nn.Module):
    """Three layers, the second of which is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.again(self.first(x)).relu()).relu())


def tower(device: str, rule: Any = "dnw", **budget: Any) -> tuple[Tower, wirings.Wiring]:
    torch.manual_seed(0)
    model = Tower().to(device)
    if isinstance(rule, rules.Keep):  # for networks that are sparse already
        wirings.finalize_(wirings.wire_(model, "fine_tune", density=0.5).model)
    wiring = wirings.wire_(model, rule, **(budget or {"density": 0.3}))
    wiring.plan(20)
    return model, wiring


def gradients(wiring: wirings.Wiring) -> list[Tensor]:
    found = [layer.weight.grad for layer in wiring.layers]
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]


def both_ways(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[], list[Tensor]], exactly: bool = True, close: float = 1e-4
) -> tuple[list[Tensor], int]:
    """Compare results with weights made at once and one by one; returns them and how often they were made at once."""
    made, plain = 0, passes.kept_of

    def counted(*args: Any) -> Any:
        nonlocal made
        made += 1
        return plain(*args)

    with monkeypatch.context() as patch:
        patch.setattr(passes, "kept_of", counted)
        at_once = run()
    with monkeypatch.context() as patch:
        patch.setattr(passes, "DEVICES", ())
        alone = run()
    for one, other in zip(at_once, alone, strict=True):
        if exactly:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=close, atol=close / 10)
    return at_once, made


@pytest.mark.parametrize("share", ["uniform", "global", "scaled"])
@pytest.mark.parametrize("rule", AT_ONCE)
def test_training_equals_layer_by_layer(rule: str, share: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.rand(8, 8) < 0.7

    def run() -> list[Tensor]:
        options = {"seed": 0} if rule in ("random", "expander", "set", "rigl", "sparse_momentum") else {}
        made = rules.get(rule, **options)
        budget: dict[str, Any] = {} if made.own_budget else {"density": 0.3, "share": share}
        model, wiring = tower(device, made, allowed={"again": mask.to(device)}, **budget)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        results = []
        for step in range(4):
            x = torch.linspace(-1, 1, 30, device=device).view(5, 6) * (step + 1)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            results += [loss.detach(), *(grad.clone() for grad in gradients(wiring))]
            if rule == "str":
                results.append(wiring.layers[0].edges.threshold.grad.clone())
            optimizer.step()
            wiring.step(optimizer)
        model.eval()
        with torch.no_grad():
            return [*results, model(x), *wiring.masks().values()]

    # Where a layer is used twice, its gradients are added before or after they are scaled; powers are rounded, and the
    # gradients of thresholds added up in another order.
    _, made = both_ways(monkeypatch, run, exactly=rule not in ("soft_threshold", "decayed_gradient", "str"))
    annealing = rule in ("acdc", "gmp", "l1_anneal")  # these rank in evaluation
    assert made == (4 if annealing else 5)  # once a pass


@pytest.mark.parametrize("rule", ["dnw", "soft_threshold", "str", "top_kast", "rigl"])
def test_autocast_gets_the_weights_that_it_would_make(rule: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, twice = [], []

    def run() -> list[Tensor]:
        model, wiring = tower(device, rules.get(rule, seed=0) if rule == "rigl" else rule)
        wiring.layers[0].module.register_forward_hook(
            lambda *_: seen.append(wiring.layers[0].edges.ready.get(torch.bfloat16))
        )
        with torch.autocast(device, torch.bfloat16):
            y = model(torch.linspace(-1, 1, 30, device=device).view(5, 6))
        y.float().square().sum().backward()
        first, again, last = gradients(wiring)
        twice.append(again)
        return [y.detach(), first, last]

    found, made = both_ways(monkeypatch, run, exactly=device == "cpu" or rule != "soft_threshold")
    # The gradients of the two uses are added in bfloat16, as for a dense layer whose weight autocast has cached.
    torch.testing.assert_close(*twice, rtol=2e-2, atol=1e-2)
    assert made == 1
    assert seen[0].used.dtype == found[0].dtype == torch.bfloat16
    assert found[1].dtype == torch.float32


def test_a_weight_that_is_read_keeps_its_precision_under_autocast(device: str) -> None:
    model, _ = tower(device)
    seen: list[torch.dtype] = []
    model.again.register_forward_hook(lambda *_: seen.append(model.first.weight.dtype))
    with torch.autocast(device, torch.bfloat16):
        model(torch.randn(5, 6, device=device))
    assert set(seen) == {torch.float32}


def test_a_layer_outside_of_autocast_computes_in_full_precision(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixed(Tower):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(device, torch.bfloat16):
                x = self.first(x)
            return self.last(self.again(x.float()))

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        model = Mixed().to(device)
        wiring = wirings.wire_(model, density=0.3)
        y = model(torch.linspace(-1, 1, 30, device=device).view(5, 6))
        assert y.dtype == torch.float32
        y.sum().backward()
        return [y.detach(), *gradients(wiring)]

    both_ways(monkeypatch, run)


def test_two_passes_before_a_backward_pass(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        model, wiring = tower(device)
        x = torch.linspace(-1, 1, 30, device=device).view(5, 6).requires_grad_()
        (model(x).sum() + model(2 * x).square().sum()).backward()
        return [x.grad, *gradients(wiring)]  # type: ignore[list-item]

    both_ways(monkeypatch, run, exactly=False)  # gradients are added in another order


def test_a_graph_keeps_the_weights_that_it_was_made_with(device: str) -> None:
    x = torch.linspace(-1, 1, 30, device=device).view(5, 6).requires_grad_()
    model, wiring = tower(device)
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    first = model(x).sum()
    with torch.no_grad():
        for layer in wiring.layers:
            layer.weight.data.mul_(3)  # seen by no version
    wiring.step()
    second = model(x).sum()
    first.backward()
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
    second.backward()


def test_a_graph_that_is_retained(device: str) -> None:
    model, wiring = tower(device)
    loss = model(torch.ones(5, 6, device=device)).square().sum()
    loss.backward(retain_graph=True)
    once = [grad.clone() for grad in gradients(wiring)]
    model(torch.zeros(5, 6, device=device))
    loss.backward()
    for grad, single in zip(gradients(wiring), once, strict=True):
        torch.testing.assert_close(grad, 2 * single)


def test_a_weight_read_in_a_pass_is_not_changed_by_the_next(device: str) -> None:
    model, wiring = tower(device)
    seen: list[Tensor] = []
    model.first.register_forward_hook(lambda *_: seen.append(model.first.weight))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    values = []
    for _ in range(3):
        model(torch.ones(5, 6, device=device)).square().sum().backward()
        values.append(seen[-1].detach().clone())
        optimizer.step()
        wiring.step(optimizer)
    assert all(torch.equal(weight, value) for weight, value in zip(seen, values, strict=True))
    assert not torch.equal(values[0], values[2])


def test_memory_of_a_pass_is_freed_with_its_graph(device: str) -> None:
    model, wiring = tower(device)
    seen: list[Any] = []
    ready = wiring.layers[2].edges.ready
    model.last.register_forward_hook(lambda *_: seen.append(weakref.ref(ready[None].used)))
    loss = model(torch.ones(5, 6, device=device)).sum()
    assert not ready
    loss.backward()
    assert seen[0]() is None


@pytest.mark.parametrize("rule", ["no_update", "top_kast", "random"])
def test_another_pass_leaves_the_gradient_of_the_first_alone(rule: str, device: str) -> None:
    grads = []
    for between in (False, True):
        model, wiring = tower(device, rules.get(rule, seed=0) if rule == "random" else rule)
        loss = model(torch.ones(5, 6, device=device)).square().sum()
        if between:
            with torch.no_grad():
                model(torch.ones(5, 6, device=device))
            model(torch.ones(5, 6, device=device))
            wiring.step()
        loss.backward()
        grads.append(gradients(wiring))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_a_fused_optimizer_inside_of_a_pass_is_noticed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Manual(Tower):
        """Trains itself in its forward pass, as with manual optimization in Lightning."""

        def forward(self, x: Tensor) -> Tensor:
            optimizer = torch.optim.SGD(self.parameters(), 0.5, fused=True)
            super().forward(x).square().sum().backward()
            optimizer.step()
            return super().forward(x)

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        model = Manual().to(device)
        wirings.wire_(model, density=0.3)
        return [model(torch.linspace(-1, 1, 30, device=device).view(5, 6)).detach()]

    both_ways(monkeypatch, run)


@pytest.mark.parametrize("rule", ["gmp", "l1_anneal"])
def test_layers_in_evaluation_rank_while_others_train(rule: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        model, wiring = tower(device, rule)
        model.again.eval()
        seen: list[Tensor] = []
        for layer in wiring.layers:
            layer.module.register_forward_hook(lambda module, *_: seen.append(module.weight.detach()))
        model(torch.ones(5, 6, device=device))
        assert [int(weight.count_nonzero()) for weight in seen] == [48, 19, 19, 32]
        return seen

    both_ways(monkeypatch, run)


def test_subclasses_that_override_a_method_are_asked(device: str) -> None:
    class LowerHalf(rules.NoUpdate):
        name = "lower_half"

        def real(self, weight: Tensor, edges: Any) -> Tensor:
            return wirings.choose(1 / weight.detach(), edges.k, edges.allowed)

    class Mixin:
        def forward(self, weight: Tensor, edges: Any) -> Tensor:
            return 3 * edges.keep(weight)

    class Mixed(Mixin, rules.DNW):  # type: ignore[misc]
        name = "mixed"

    class Same(rules.DNW):
        name = "same"

    assert LowerHalf().kept_at_once is None
    assert Mixed().kept_at_once is None
    assert Same().kept_at_once is not None
    for rule in (LowerHalf(), Mixed()):
        model, wiring = tower(device, rule)
        seen: list[Tensor] = []
        model.first.register_forward_hook(lambda *_, model=model, seen=seen: seen.append(model.first.weight))
        model(torch.ones(5, 6, device=device))
        factor = 3.0 if isinstance(rule, Mixed) else 1.0
        real = wiring.masks()["first.weight"]
        assert torch.equal(seen[0], torch.where(real, factor * wiring.layers[0].weight, 0.0))


def test_hooks_that_a_user_registers_in_every_pass_do_not_add_up(device: str) -> None:
    model, wiring = tower(device)

    def halve(*_: Any) -> None:
        model.first.weight.register_hook(lambda grad: grad / 2)

    model.first.register_forward_hook(halve)
    norms = []
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(5, 6, device=device)).sum().backward()
        norms.append(gradients(wiring)[0].norm())
    assert norms[0] == norms[1] == norms[2]


def test_selective_checkpoints(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)

    def run() -> list[Tensor]:
        model, wiring = tower(device, "top_kast")
        x = torch.linspace(-1, 1, 30, device=device).view(5, 6).requires_grad_()
        y: Any = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        y.square().sum().backward()
        return gradients(wiring)

    both_ways(monkeypatch, run)


def test_cached_parametrizations_keep_the_precision_of_weights(device: str) -> None:
    model, _ = tower(device)
    x = torch.ones(5, 6, device=device)
    with parametrize.cached():
        with torch.autocast(device, torch.bfloat16):
            model(x)
        assert model(x).dtype == torch.float32


def test_weights_read_in_two_precisions_are_made_twice(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(Tower):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.first.weight.sum() + self.last.weight.sum())

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        model = Reads().to(device)
        wiring = wirings.wire_(model, density=0.3)
        with torch.autocast(device, torch.bfloat16):
            y = model(torch.linspace(-1, 1, 30, device=device).view(5, 6))
        y.float().sum().backward()
        return [y.detach(), *gradients(wiring)]

    _, made = both_ways(monkeypatch, run, exactly=False, close=1e-2)
    assert made == 2


def test_a_default_device_does_not_matter(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        model, wiring = tower(device)
        with torch.device(device):
            model(torch.ones(5, 6)).sum().backward()
        return gradients(wiring)

    _, made = both_ways(monkeypatch, run)
    assert made == 1


@pytest.mark.parametrize("rule", ["random", "set", "rigl", "fine_tune"])
def test_masks_of_a_global_budget_have_memory_of_their_own(rule: str, device: str) -> None:
    _, wiring = tower(device, rule, density=0.3, share="global")
    assert all(layer.edges.wiring.storage_offset() == 0 for layer in wiring.layers)


def test_frozen_layers_and_passes_without_gradients(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        model, wiring = tower(device)
        wiring.layers[1].weight.requires_grad_(False)
        x = torch.linspace(-1, 1, 30, device=device).view(5, 6)
        with torch.no_grad():
            before = model(x)
        with torch.inference_mode():
            again = model(x)
        y = model(x)
        y.sum().backward()
        assert wiring.layers[1].weight.grad is None
        grads = [layer.weight.grad for layer in wiring.layers[::2]]
        return [before, again.clone(), y.detach(), *grads]  # type: ignore[list-item]

    both_ways(monkeypatch, run)


@pytest.mark.parametrize("rule", ["soft_threshold", "str"])
@pytest.mark.parametrize("share", ["uniform", "global"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_makes_all_weights_once_more(
    reentrant: bool, share: str, rule: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Checkpointed(Tower):
        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.first, self.again, self.last):
                x = checkpoint(layer, x, use_reentrant=reentrant)  # type: ignore[assignment]
            return x

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        model = Checkpointed().to(device)
        wiring = wirings.wire_(model, rule, density=0.3, share=share)
        x = torch.linspace(-1, 1, 30, device=device).view(5, 6).requires_grad_()
        model(x).square().sum().backward()
        return [x.grad, *gradients(wiring)]  # type: ignore[list-item]

    _, made = both_ways(monkeypatch, run, exactly=device == "cpu")
    assert made == 2


def test_a_submodule_called_after_recomputation_is_up_to_date(device: str) -> None:
    model, wiring = tower(device)
    checkpoint(model, torch.ones(5, 6, device=device, requires_grad=True), use_reentrant=False).sum().backward()
    wiring.layers[0].weight.data.zero_()  # seen by no version
    assert not model.first.weight.any()


def test_transforms_see_the_same_weights(device: str) -> None:
    model, wiring = tower(device)
    x = torch.linspace(-1, 1, 30, device=device).view(5, 6)
    model(x).square().sum().backward()
    expected = gradients(wiring)
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    found = torch.func.grad(loss)(parameters, x)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x.unsqueeze(1))
    for layer, grad in zip(wiring.layers, expected, strict=True):
        name = layer.name.replace("weight", "parametrizations.weight.original")
        torch.testing.assert_close(found[name], grad)
        torch.testing.assert_close(each[name].sum(0), grad)


@pytest.mark.parametrize("rule", ["dnw", "no_update", "str"])
def test_transforms_that_follow_other_parameters(rule: str, device: str) -> None:
    model, _ = tower(device, rule)
    x = torch.linspace(-1, 1, 30, device=device).view(5, 6)
    model(x).square().sum().backward()

    def loss(bias: Tensor) -> Tensor:
        return torch.func.functional_call(model, {"first.bias": bias}, (x,)).square().sum()

    torch.testing.assert_close(torch.func.grad(loss)(model.first.bias.detach()), model.first.bias.grad)


def test_tied_layers_share_their_weight(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 6)).to(device)
        model[2].weight = model[0].weight
        wiring = wirings.wire_(model, density=0.3)
        y = model(torch.linspace(-1, 1, 30, device=device).view(5, 6))
        y.square().sum().backward()
        return [y.detach(), *gradients(wiring)]

    _, made = both_ways(monkeypatch, run)
    assert made == 1


def test_a_copy_made_in_a_pass_works(device: str) -> None:
    model, _ = tower(device)
    copies: list[nn.Module] = []
    model.last.register_forward_pre_hook(lambda module, _: copies.append(copy.deepcopy(model.first)))
    x = torch.ones(5, 6, device=device)
    model(x)
    assert torch.equal(copies[0].weight, model.first.weight)  # type: ignore[arg-type]


def test_a_rule_with_its_own_forward_is_asked(device: str) -> None:
    class Doubled(rules.DNW):
        name = "doubled"

        def forward(self, weight: Tensor, edges: Any) -> Tensor:
            return 2 * edges.keep(weight)

    assert Doubled().kept_at_once is None
    model, wiring = tower(device, Doubled())
    seen: list[Tensor] = []
    model.first.register_forward_hook(lambda *_: seen.append(model.first.weight))
    model(torch.ones(5, 6, device=device)).sum().backward()
    real = torch.where(wiring.masks()["first.weight"], wiring.layers[0].weight, 0.0)
    assert torch.equal(seen[0], 2 * real)


def made_by_hand(weights: list[Tensor], rule: str, share: str, density: float) -> list[Tensor]:
    """The weights that a forward pass uses: chosen with `choose`, and shrunk by the magnitude of the next one."""
    groups = [torch.cat([w.reshape(-1) for w in weights])] if share == "global" else [w.reshape(-1) for w in weights]
    found = []
    for row in groups:
        real = wirings.choose(row, int(density * row.numel() + 1e-6))
        if rule == "soft_threshold":
            next_one = row[~real].abs().max()
            row = row.sign() * (row.abs() ** 3 - next_one**3).clamp(min=0) ** (1 / 3)
        found.append(torch.where(real, row, 0.0))
    sizes = [w.numel() for w in weights]
    parts = found[0].split(sizes) if share == "global" else found
    return [part.view(w.shape) for part, w in zip(parts, weights, strict=True)]


@pytest.mark.parametrize("share", ["uniform", "global"])
@pytest.mark.parametrize("rule", ["dnw", "soft_threshold"])
def test_generation_of_a_wired_language_model(rule: str, share: str, device: str) -> None:
    importlib.import_module("vision")  # transformers imports torchvision if it is installed
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).to(device).eval()
    wiring = wirings.wire_(model, rule, density=0.4, share=share)
    prompt = torch.randint(64, (2, 5), device=device)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    seen: list[list[Tensor]] = [[] for _ in wiring.layers]
    for layer, used in zip(wiring.layers, seen, strict=True):
        layer.module.register_forward_hook(lambda module, *_, used=used: used.append(module.weight.clone()))
    for _ in range(2):  # the weights change between the two, without a version
        expected = made_by_hand([layer.weight.detach() for layer in wiring.layers], rule, share, 0.4)
        model.generate(prompt, **settings)
        for used, weight in zip(seen, expected, strict=True):
            assert len(used) == 8  # one for each token
            for one in used:
                if rule == "dnw":
                    assert torch.equal(one, weight)
                else:
                    torch.testing.assert_close(one, weight, rtol=1e-3, atol=1e-4)
                    assert not one[weight == 0].any()
            used.clear()
        wiring.layers[1].weight.data.mul_(1.5).add_(0.01)
    wired = model.generate(prompt, **settings)
    wirings.finalize_(model)
    assert torch.equal(model.generate(prompt, **settings), wired)


def test_masks_of_rules_are_applied_at_once(device: str) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(33, 20, device=device), torch.randn(8, 4, 3, 3, device=device)]
    weights[1] = weights[1].to(memory_format=torch.channels_last)
    masks = [weight > 0.3 for weight in weights]
    ks = [torch.tensor(1, device=device)] * 2
    for dtype in (torch.float32, torch.bfloat16):
        for part, weight, mask in zip(batched.masked_of(weights, ks, masks, dtype), weights, masks, strict=True):
            assert torch.equal(part, torch.where(mask, weight, 0.0).to(dtype))


@pytest.mark.parametrize("rule", ["dnw", "gmp", "str", "top_kast", "decayed_gradient"])
def test_frozen_and_unused_layers_get_no_gradient(rule: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Skips(Tower):
        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.first(x).relu())

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        model = Skips().to(device)
        wiring = wirings.wire_(model, rule, density=0.3)
        wiring.plan(20)
        model.first.parametrizations.weight.original.requires_grad_(False)  # type: ignore[union-attr, operator]
        y = model(torch.linspace(-1, 1, 30, device=device).view(5, 6))
        y.square().sum().backward(retain_graph=True)
        y.square().sum().backward()
        first, again, last = [layer.weight.grad for layer in wiring.layers]
        assert first is None
        assert last is None
        assert again is not None
        return [y.detach(), again]

    _, made = both_ways(monkeypatch, run)
    assert made == 1


@pytest.mark.parametrize("rule", ["dnw", "str", "top_kast"])
def test_gradients_of_gradients(rule: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        model, wiring = tower(device, rule)
        x = torch.linspace(-1, 1, 30, device=device).view(5, 6)
        weights = [layer.weight for layer in wiring.layers]
        grads = torch.autograd.grad(model(x).square().sum(), weights, create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()  # type: ignore[union-attr]
        return [*(grad.detach() for grad in grads), *gradients(wiring)]

    _, made = both_ways(monkeypatch, run, exactly=False)
    assert made == 1


def test_hooks_that_follow_each_gradient_see_them_one_by_one(device: str) -> None:
    model, wiring = tower(device, "top_kast")
    seen: list[tuple[int, int]] = []  # the layer, and how many others had their gradients by then
    weights = [layer.weight for layer in wiring.layers]
    for i, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(
            lambda _, i=i: seen.append((i, sum(w.grad is not None for w in weights)))
        )
    model(torch.randn(5, 6, device=device)).sum().backward()
    assert seen == [(2, 1), (1, 2), (0, 3)]
    for layer in wiring.layers:
        assert layer.weight.grad is not None
        assert not layer.weight.grad[~layer.edges.choose_more(layer.weight, 0.5)].any()


def test_a_hook_on_the_weight_of_a_pass_sees_its_gradient(device: str) -> None:
    model, wiring = tower(device, "top_kast")
    seen: list[Tensor] = []

    def look(*_: Any) -> None:
        model.last.weight.register_hook(seen.append)  # type: ignore[arg-type]

    model.last.register_forward_pre_hook(look)
    model(torch.randn(5, 6, device=device)).sum().backward()
    assert len(seen) == 1
    assert seen[0].shape == wiring.layers[2].weight.shape
