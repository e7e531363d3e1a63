"""Users' mistakes: one error class, a message that says how to fix it, and an unchanged model."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

import wirings
from wirings import WiringError, finalize_, unwire_, wire_
from wirings.wire import handle
from wirings.wire.report import report_layers


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4))


def with_nan() -> nn.Sequential:
    model = network()
    with torch.no_grad():
        model[3].weight[1, 2] = float("nan")
    return model


def weight_normed() -> nn.Sequential:
    model = network()
    parametrizations.weight_norm(model[3])
    return model


def already_wired() -> nn.Sequential:
    model = network()
    wire_(model, density=0.5)
    return model


def empty() -> nn.Sequential:
    model = network()
    model[3].weight = nn.Parameter(torch.empty(0, 8))
    return model


def expanded() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = nn.Parameter(torch.randn(1, 8).expand(8, 8), requires_grad=False)
    return model


def tied() -> nn.Module:
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 8), "up": nn.Linear(8, 8), "head": nn.Linear(8, 8, bias=False)})
    model["head"].weight = model["embedding"].weight
    return model


MISTAKES = {
    "density of zero": (network, {"density": 0.0}, r"density must be in \(0, 1\].*got 0.0"),
    "density in percent": (network, {"density": 5.0}, "For 5.0 % write 0.05"),
    "no budget": (network, {}, "one of density=, k= or budget="),
    "k too large": (network, {"k": 1000}, "k = 1000 edges were requested, but the 2 layers .* allow only 248; lower k"),
    "k too large in a layer": (network, {"budget": {"3": 33}}, "33 edges were requested in 3.weight.*only 32"),
    "skip matches nothing": (network, {"density": 0.1, "skip": ["fc"]}, r"skip=\['fc'\] matches no weight.*0, 3"),
    "tied weights have several names": (
        tied,
        {"density": 0.1, "skip": ["lm_head"]},
        r"Its weights: embedding, head, up\.",
    ),
    "include matches nothing": (network, {"density": 0.1, "include": ["fc"]}, r"include=\['fc'\] matches no weight"),
    "budget matches nothing": (
        network,
        {"budget": {"fc": 0.1}},
        r"budget\['fc'\] matches no wired layer \(0.weight, 3.weight\)",
    ),
    "nothing is left": (network, {"density": 0.1, "skip": ["*"]}, "leave no layer to wire"),
    "skip is a string": (network, {"density": 0.1, "skip": "3"}, r"write skip=\['3'\]"),
    "unknown rule": (network, {"rule": "dwn", "density": 0.1}, "unknown rule 'dwn'. Did you mean 'dnw'.*random"),
    "another spelling of a rule": (
        network,
        {"rule": "RigL", "density": 0.1},
        "unknown rule 'RigL'. Did you mean 'rigl'",
    ),
    "a rule in capitals": (network, {"rule": "DNW", "density": 0.1}, "unknown rule 'DNW'. Did you mean 'dnw'"),
    "a rule with a hyphen": (
        network,
        {"rule": "soft-threshold", "density": 0.1},
        "unknown rule 'soft-threshold'. Did you mean 'soft_threshold'",
    ),
    "the name of a rule's class": (
        network,
        {"rule": "SparseMomentum", "density": 0.1},
        "Did you mean 'sparse_momentum'",
    ),
    "sparsity": (network, {"sparsity": 0.9}, r"unexpected argument sparsity=0.9. Did you mean density=0.1\?"),
    "sparsity in percent": (network, {"sparsity": 90}, r"sparsity=90. Did you mean density=1 - sparsity\?"),
    "a misspelt argument": (network, {"densty": 0.1}, r"unexpected argument densty=0.1. Did you mean density=\?"),
    "an unknown argument": (network, {"zzz": 0.1}, r"unexpected argument zzz=0.1\."),
    "rule is a class": (
        network,
        {"rule": wirings.rules.DNW, "density": 0.1},
        "the name of a rule or a wirings.rules.Rule, got",
    ),
    "dense with a budget": (
        network,
        {"rule": "dense", "density": 0.1},
        "fixes the number of edges itself; drop density",
    ),
    "unknown share": (network, {"density": 0.1, "share": "globl"}, "Did you mean 'global'"),
    "wired twice": (
        already_wired,
        {"density": 0.1},
        "0.weight is already wired. Call wirings.finalize_ or wirings.unwire_",
    ),
    "NaN": (with_nan, {"density": 0.1}, "3.weight contains 1 NaN among its 32 weights"),
    "no layers": (nn.ReLU, {"density": 0.1}, "ReLU has no layer to wire: expected a Linear"),
    "norms alone": (lambda: nn.BatchNorm2d(3), {"density": 0.1}, "no layer to wire"),
    "weight norm": (weight_normed, {"density": 0.1}, "3.weight has another parametrization.*_WeightNorm"),
    "meta device": (lambda: nn.Linear(3, 4, device="meta"), {"density": 0.1}, "weight is on the meta device"),
    "complex": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64)),
        {"density": 0.5},
        r"1.weight is torch.complex64, but edges are ranked in float16.* skip=\['1.weight'\]",
    ),
    "no weights": (
        empty,
        {"density": 0.5},
        r"3.weight is empty: its shape is \(0, 8\); use skip=\['3.weight'\]",
    ),
    "expanded": (expanded, {"density": 0.5}, r"1.weight is an expanded tensor.*\.contiguous\(\)"),
    "lazy layer": (lambda: nn.LazyLinear(3), {"density": 0.1}, "weight has no shape yet"),
    "allowed has another shape": (
        network,
        {"density": 0.1, "allowed": {"3": torch.ones(4, 9).bool()}},
        r"3.weight's shape \(4, 8\), got torch.bool of shape \(4, 9\)",
    ),
    "budget is a number": (network, {"budget": 0.1}, "for one number for all layers use density= or k="),
    "not a module": (
        lambda: nn.Linear(2, 2).parameters(),
        {"density": 0.1},
        "expects a torch.nn.Module, got generator",
    ),
    "skip is not a name": (network, {"density": 0.1, "skip": [3]}, "a pattern must be a string, got 3; write '3'"),
    "allowed is a list": (network, {"density": 0.1, "allowed": {"3": [1]}}, "must be a boolean tensor, got list"),
    "allowed allows nothing": (
        network,
        {"density": 0.1, "allowed": {"3": torch.zeros(4, 8).bool()}},
        "allows no edge of 3.weight",
    ),
    "k above what is allowed": (
        network,
        {"budget": {"3": 9}, "allowed": {"3": torch.eye(4, 8).bool()}},
        "9 edges were requested in 3.weight.*allows only 4",
    ),
    "skip is a number": (network, {"density": 0.1, "skip": 3}, "skip= expects a list of patterns, got 3"),
    "include is a tensor": (
        network,
        {"density": 0.1, "include": torch.tensor(0.5)},
        r"include= expects a list of patterns, got tensor\(0.5",
    ),
    "allowed is one mask": (
        network,
        {"density": 0.1, "allowed": torch.ones(4, 8).bool()},
        r"allowed= expects a mapping from layer patterns, got a Tensor of shape \(4, 8\)",
    ),
    "axes are a word": (network, {"density": 0.1, "axes": "in out"}, "axes= expects a mapping .*, got 'in out'"),
    "budget by number": (
        network,
        {"budget": {3: 0.5}},
        r"budget= expects a mapping from layer patterns.*got \{3: 0.5\}",
    ),
    "start is an array": (
        network,
        {"start": np.zeros((30, 30))},
        r"unknown start 'a ndarray of shape \(30, 30\)'\. Choose from: weights",
    ),
    "share is an array": (network, {"density": 0.1, "share": np.zeros((30, 30))}, "share must be a text"),
    "a tensor for a rule": (
        network,
        {"density": 0.1, "rule": torch.zeros(50, 50)},
        r"the name of a rule or a wirings.rules.Rule, got a Tensor of shape \(50, 50\)",
    ),
    "a tensor for k": (network, {"k": torch.zeros(50, 50)}, r"k must be .* got a Tensor of shape \(50, 50\)"),
    "allowed matches nothing": (
        network,
        {"density": 0.1, "allowed": {"9": torch.ones(1).bool()}},
        "matches no wired layer",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_mistakes_in_wiring(mistake: str) -> None:
    build, arguments, says = MISTAKES[mistake]
    model = build()
    before = None if mistake in ("lazy layer", "meta device", "not a module") else copy.deepcopy(model)
    with pytest.raises(WiringError, match=says):
        wire_(model, **arguments)
    if before is not None:
        assert repr(model) == repr(before), "the model is unchanged"
        for module, other in zip(model.modules(), before.modules(), strict=True):
            assert list(module.__dict__) == list(other.__dict__)
            for hooks in ("_forward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks"):
                assert len(getattr(module, hooks)) == len(getattr(other, hooks))
        for (name, a), (other, b) in zip(model.state_dict().items(), before.state_dict().items(), strict=True):
            assert name == other
            assert torch.equal(a, b) or torch.isnan(a).any()


def test_the_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="unknown rule"):
        wirings.rules.get("nothing")


def test_skipping_what_another_parametrization_holds() -> None:
    model = weight_normed()
    assert [layer.name for layer in wire_(model, density=0.5, skip=["3"]).layers] == ["0.weight"]
    finalize_(model)
    assert "3.parametrizations.weight.original0" in model.state_dict()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_the_older_weight_norm_has_no_weight_to_wire() -> None:
    model = nn.Sequential(weight_norm(nn.Linear(4, 4)))
    with pytest.raises(WiringError, match=r"0\.weight is not a parameter: a hook computes it from weight_g, weight_v"):
        wire_(model, density=0.5)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_weights_computed_by_hooks_are_rejected() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), weight_norm(nn.Linear(4, 4)), prune.l1_unstructured(nn.Linear(4, 4), "weight", 3)
    )
    with pytest.raises(WiringError, match=r"1\.weight is not a parameter.*remove_weight_norm.*or use skip=\['1'\]"):
        wire_(model, density=0.5)
    with pytest.raises(WiringError, match=r"2\.weight is not a parameter: .*prune computes it from weight_orig"):
        wire_(model, density=0.5, skip=["1"])
    assert [layer.name for layer in wire_(model, density=0.5, skip=["1", "2"]).layers] == ["0.weight"]
    unwire_(model)
    assert [layer.name for layer in wire_(model, density=0.5, include=["0"]).layers] == ["0.weight"]
    recurrent = weight_norm(nn.LSTM(4, 4), "weight_hh_l0")
    with pytest.raises(WiringError, match=r"weight_hh_l0 is not a parameter.*from weight_hh_l0_g, weight_hh_l0_v"):
        wire_(recurrent, density=0.5)


def test_different_parameters_in_the_same_memory_cannot_be_wired() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    model[2].weight = nn.Parameter(model[0].weight.detach().t())  # tied, but transposed: two parameters
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(WiringError, match=r"2\.weight shares its memory with 0\.weight.*a\.weight = b\.weight.*clone"):
        wire_(model, density=0.5)
    with pytest.raises(WiringError, match=r"0\.weight shares its memory with 2\.weight"):
        wire_(model, density=0.5, skip=["2"])
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    assert not any(hasattr(module, "parametrizations") for module in model)
    model[2].weight = nn.Parameter(model[0].weight.detach().t().clone())
    finalize_(wire_(model, density=0.5).model)
    first, second = torch.randn(64).split(32)
    model[0].weight, model[2].weight = nn.Parameter(first.view(8, 4)), nn.Parameter(second.view(4, 8))
    assert len(wire_(model, density=0.5).layers) == 2, "adjacent parts of one allocation are fine"


@pytest.mark.parametrize("call", [finalize_, unwire_])
def test_a_model_that_is_not_wired(call: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(WiringError, match="Sequential is not wired"):
        call(network())


def test_nan_is_found_when_finalizing_and_shows_in_the_loss() -> None:
    model = network()
    wiring = wire_(model, density=0.1)
    with torch.no_grad():
        wiring.layers[1].weight[0, 0] = float("nan")
    assert torch.isnan(model(torch.randn(2, 3, 3, 3)).sum())
    with pytest.raises(WiringError, match=r"3\.weight contains 1 NaN"):
        finalize_(model)
    assert wiring.layers[0].weight.count_nonzero() > 200, "the model is unchanged and still wired"
    assert repr(wiring).startswith("<Wiring of Sequential")


def test_a_broken_rule_is_found_when_finalizing() -> None:
    class TooMany(wirings.rules.Rule):
        name = "too many"

        def real(self, weight: torch.Tensor, edges: wirings.rules.EdgesLike) -> torch.Tensor:
            return wirings.choose(weight, edges.k + 1)

    model = nn.Linear(4, 4)
    wire_(model, TooMany(), k=3)
    with pytest.raises(WiringError, match=r"weight: rule 'too many' should have 3 real edges.*but it has 4"):
        finalize_(model)


def test_a_broken_total_is_found_when_finalizing() -> None:
    model = network()
    wiring = wire_(model, "random", k=20, share="global")
    wiring.layers[0].edges.wiring.zero_()
    with pytest.raises(WiringError, match=r"should have 20 real edges over all layers .*, but it has"):
        finalize_(model)


def test_failure_half_way_restores_the_model() -> None:
    class Fails(wirings.rules.DNW):
        name = "fails"

        def setup(self, layers: object) -> None:
            raise RuntimeError("no")

    model = network()
    keys, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    with pytest.raises(RuntimeError, match="no"):
        wire_(model, Fails(), density=0.1, share="global")
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == kinds
    assert not model._forward_pre_hooks


def test_rejects_scripted_models() -> None:
    with pytest.raises(WiringError, match=r"wire a model before scripting or tracing it \(torch\.jit\)"):
        wire_(torch.jit.script(nn.Sequential(nn.Linear(2, 2))), density=0.5)


def test_failure_leaves_an_earlier_wiring_alone() -> None:
    model = network()
    first = wire_(model[0], "random", density=0.5)
    with pytest.raises(WiringError, match=r"0\.weight is already wired"):
        wire_(model, density=0.1)
    with pytest.raises(WiringError, match="unknown share"):
        wire_(model, density=0.1, skip=["0"], share="all")
    second = wire_(model, density=0.25, skip=["0"], share="global")  # two wirings in one model
    assert [report.edges for report in (*first.look(), *second.look())] == [108, 8]
    finalize_(model)
    assert not model._forward_pre_hooks
    assert (int(model[0].weight.count_nonzero()), int(model[3].weight.count_nonzero())) == (108, 8)


def test_mistakes_around_rules() -> None:
    with pytest.raises(WiringError, match="does not take these settings"):
        wirings.rules.get("random", sead=3)
    with pytest.raises(WiringError, match="a rule named 'dnw' is already registered"):
        wirings.rules.register(type("Other", (wirings.rules.DNW,), {}))


def test_rejects_states_of_other_wirings() -> None:
    wiring = wire_(network(), density=0.1)
    with pytest.raises(WiringError, match="saved with rule 'random', but the model is wired with 'dnw'"):
        wiring.load_state_dict({"rule": "random", "steps": 3, "edges": [21, 3]})
    with pytest.raises(WiringError, match="saved with 108, 16 edges, but at step 3 the model is wired with 21, 3"):
        wiring.load_state_dict({"rule": "dnw", "steps": 3, "edges": [108, 16]})
    for state, match in (
        (None, "got NoneType"),
        ([1], "got list"),
        ({"rule": "dnw", "steps": "x", "edges": []}, "'x'"),
    ):
        with pytest.raises(WiringError, match=match):
            wiring.load_state_dict(state)  # type: ignore[arg-type]
    assert wiring.steps == 0


def test_rejects_optimizers_without_learning_rate() -> None:
    with pytest.raises(WiringError, match=r"wiring.step\(\) expects an optimizer or None, got str"):
        wire_(network(), density=0.1).step("adam")  # type: ignore[arg-type]
    model = network()
    wiring = wire_(model, wirings.rules.get("l1_anneal", steps=10), density=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None  # as in optimizers that choose their own
    with pytest.raises(WiringError, match=r"the SGD passed to wiring.step\(\) has none for .*\(lr=None\)"):
        wiring.step(optimizer)


def test_rejects_unknown_schedules() -> None:
    with pytest.raises(WiringError, match="unknown kind of schedule"):
        wire_(network(), wirings.rules.get("dnw", schedule={"kind": ["cubic"]}), density=0.1)


def test_the_rule_nm_names_what_replaced_it() -> None:
    with pytest.raises(WiringError, match=r"rule 'nm' no longer exists. .*wire_\(model, \"dnw\", structure=\"2:4\"\)"):
        wire_(network(), "nm")


def test_rejects_a_rule_that_applies_a_shared_budget_to_each_layer() -> None:
    class EachLayer(wirings.rules.Rule):
        name = "each_layer"

        def real(self, weight: torch.Tensor, edges: Any) -> torch.Tensor:
            return wirings.choose(weight, edges.k, edges.allowed)

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    with pytest.raises(WiringError, match=r"32 real edges over .* \(0\.weight, 1\.weight\), but it has 64\."):
        wire_(model, EachLayer(), density=0.25, share="global")
    assert type(model[0]) is torch.nn.Linear, "it is unwired again"


def test_wiring_makes_one_report(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(*args: Any) -> Any:
        made.append(args)
        return report_layers(*args)

    monkeypatch.setattr(handle, "report_layers", counted)
    wiring = wire_(network(), density=0.5, share="global")
    assert len(made) == 1
    assert [report.swapped for report in wiring.report()] == [0, 0]
