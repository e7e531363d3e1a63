"""LoRA: adapters stay dense when a model is wired, and are merged within the wiring."""

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wirings
from wirings import WiringError, finalize_, merge_adapters_, wire_


class LoraLinear(nn.Module):
    """A stand-in with the structure of PEFT's layer of this name, which may not be installed."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer, self.merged = base, False
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        base.requires_grad_(False)

    def delta(self) -> Tensor:
        return 0.5 * self.lora_B["default"].weight @ self.lora_A["default"].weight

    def merge(self) -> None:
        self.base_layer.weight.data += self.delta()
        self.merged = True

    def unmerge(self) -> None:
        self.base_layer.weight.data -= self.delta()
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        out = self.base_layer(x)
        return out if self.merged else out + x @ self.delta().t()


def pruned(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    with torch.no_grad():
        for place in (0, 2):
            model[place].weight[torch.rand_like(model[place].weight) < 0.6] = 0.0
    return model


def adapt(model: nn.Sequential) -> None:
    for place in (0, 2):
        model[place] = LoraLinear(model[place])


@pytest.mark.parametrize("rule", ["keep", "dnw", "rigl", "soft_threshold"])
@pytest.mark.parametrize("first", ["wired", "adapted"])
def test_merged_and_finalized_models_have_the_same_zeros(rule: str, first: str) -> None:
    model = pruned()
    zeros = {place: model[place].weight.detach() == 0 for place in (0, 2)}
    if first == "adapted":
        adapt(model)
    wiring = wire_(model, rule, start="weights")
    if first == "wired":
        adapt(model)
    assert len(wiring.layers) == 2
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
    expected = {
        place: torch.where(zeros[place], 0.0, model[place].base_layer.weight + model[place].delta()).detach()
        for place in (0, 2)
    }
    assert merge_adapters_(model) is model
    assert [type(module).__name__ for module in model] == ["ParametrizedLinear", "Tanh", "ParametrizedLinear"]
    assert all(
        torch.equal(wiring.masks()[layer.name], ~zeros[place])
        for place, layer in zip((0, 2), wiring.layers, strict=True)
    )
    finalize_(model)
    for place in (0, 2):
        torch.testing.assert_close(model[place].weight.detach(), expected[place])
        assert torch.equal(model[place].weight == 0, zeros[place])


def test_a_ranked_wiring_survives_the_merge() -> None:
    """Hallucinated edges keep their weights with `dnw`, and would be ranked above what the merge makes smaller."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    wiring = wire_(model, "dnw", density=0.5, share="global")
    before = wiring.masks()
    adapt(model)
    with torch.no_grad():
        for place in (0, 2):
            model[place].lora_B["default"].weight.mul_(3.0)
    merge_adapters_(model)
    assert all(torch.equal(mask, before[name]) for name, mask in wiring.masks().items())
    used = {layer.name: layer.module.weight.detach().clone() for layer in wiring.layers}
    finalize_(model)
    assert all(torch.equal(model.get_parameter(name.replace(".base_layer", "")), w) for name, w in used.items())


def test_adapters_stay_dense_unless_they_are_named() -> None:
    model = pruned()
    adapt(model)
    before = copy.deepcopy(model.state_dict())
    wiring = wire_(model, density=0.5)
    assert [layer.name for layer in wiring.layers] == ["0.base_layer.weight", "2.base_layer.weight"]
    finalize_(model)
    for name, value in model.state_dict().items():
        assert "lora_" not in name or torch.equal(value, before[name])
    assert [layer.name for layer in wire_(model, density=0.5, include=["0.lora_A"]).layers] == [
        "0.lora_A.default.weight"
    ]


def test_clear_errors() -> None:
    model = pruned()
    wire_(model, "keep", skip=["2"])
    with pytest.raises(WiringError, match="Sequential has no adapters to merge"):
        merge_adapters_(model)
    adapt(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(WiringError, match="2 has an adapter, but its weight is not wired, so merging would fill its"):
        merge_adapters_(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model[2].merge()  # it is meant to be dense
    model[0].merge()
    with pytest.raises(WiringError, match=r"adapter of 0 counts as merged, but .*get_submodule\(.0.\)\.unmerge\(\)"):
        merge_adapters_(model)
    model[0].unmerge()
    merged = merge_adapters_(model)
    assert not [name for name in merged.state_dict() if "lora_" in name]


def peft_model(wired_first: bool, **options: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    """A small GPT-2 of which half the weights are zero, with LoRA: the adapted model, its wiring, the zeros."""
    try:
        peft, transformers = importlib.import_module("peft"), importlib.import_module("transformers")
    except Exception as error:
        pytest.skip(f"pip install peft transformers: {error}")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(32, (4, 8))
    wirings.prune_(model, [tokens], density=0.5, skip=["lm_head"])
    zeros = {name: p == 0 for name, p in model.named_parameters() if int((p == 0).sum()) > 8 and p.dim() > 1}
    assert len(zeros) == 8
    config = peft.LoraConfig(target_modules=["c_attn", "c_fc", "c_proj"], init_lora_weights=False, **options)
    wiring = wire_(model, "keep", skip=["lm_head"]) if wired_first else None
    adapted = peft.get_peft_model(model, config)
    if wiring is None:
        wiring = wire_(adapted, "keep", skip=["*.lm_head"])
    return adapted, wiring, zeros


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wired_first", [True, False])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"lora_bias": True}], ids=["lora", "dora", "bias"])
def test_peft_adapters_are_merged_within_the_wiring(wired_first: bool, options: dict[str, Any], tmp_path: Path) -> None:
    adapted, wiring, zeros = peft_model(wired_first, **options)
    assert len(wiring.layers) == 8
    assert not any("lora_" in layer.name for layer in wiring.layers)
    tokens = torch.randint(32, (4, 8))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.01)
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    wiring.step(optimizer)
    adapted.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    before = {name: w.detach().clone() for name, w in _plain(adapted).items()}
    model = finalize_(merge_adapters_(adapted))
    assert not [name for name in model.state_dict() if "lora_" in name or "base_layer" in name]
    for name, mask in zeros.items():
        weight = model.get_parameter(name)
        assert torch.equal(weight == 0, mask), name
        assert not torch.equal(weight, before[name]), "the adapter was merged"
    model.save_pretrained(tmp_path / "merged")
    again = type(model).from_pretrained(tmp_path / "merged")
    assert all(torch.equal(again.get_parameter(name) == 0, mask) for name, mask in zeros.items())
    torch.testing.assert_close(again.eval()(tokens).logits, model.eval()(tokens).logits)


def _plain(adapted: Any) -> dict[str, Tensor]:
    """The weights of the base model under their plain names."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): value
        for name, value in adapted.state_dict().items()
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wired_first", [True, False])
@pytest.mark.parametrize("call", ["merge_and_unload", "merge_adapter"])
def test_pefts_own_merge_of_a_wired_model_is_an_error(call: str, wired_first: bool) -> None:
    """It would write to a weight that is computed anew, and lose what the adapters have learned."""
    adapted, _, zeros = peft_model(wired_first)
    before = copy.deepcopy(adapted.state_dict())
    with pytest.raises(WiringError, match=r"merge\(\) of PEFT does not reach wired weights.*merge_adapters_\(model\)"):
        getattr(adapted, call)()
    assert all(torch.equal(value, before[name]) for name, value in adapted.state_dict().items())
    merged = finalize_(merge_adapters_(adapted))
    assert all(torch.equal(merged.get_parameter(name) == 0, mask) for name, mask in zeros.items())


@pytest.mark.filterwarnings("ignore")
def test_peft_merges_as_before_where_nothing_is_wired() -> None:
    adapted, _, _ = peft_model(wired_first=True)
    tokens = torch.randint(32, (4, 8))
    expected = finalize_(adapted).eval()(tokens).logits
    torch.testing.assert_close(adapted.merge_and_unload().eval()(tokens).logits, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_initializations_that_write_to_a_wired_weight_are_errors(kind: str) -> None:
    """The adapter would start with a part of the weight that is not taken out of it."""
    adapted, _, _ = peft_model(wired_first=True)
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(target_modules=["c_attn"], init_lora_weights=kind, fan_in_fan_out=True)
    with pytest.raises(WiringError, match=rf"{kind}_init of PEFT writes to the weight below the adapter"):
        peft.get_peft_model(adapted.unload(), config)
