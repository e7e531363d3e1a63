"""Hugging Face models: wired, trained by the Trainer, saved with their wiring, wired again, finalized."""

import copy
import json
import pickle
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from rule_options import OPTIONS
from torch import nn
from transformers_models import GENERATES, TOKENS, auto, logits, make, need_transformers, trainer

import wirings
from wirings import WiringError, rules

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings inside these packages are not ours to fix
KINDS = ("gpt2", "llama", "bert", "vit", "t5", "mixtral", "gpt_oss")


@pytest.fixture(autouse=True)
def _transformers() -> None:
    need_transformers()


def callback(wiring: wirings.Wiring, **options: Any) -> Any:
    from wirings.train.integrations.hugging_face import WiringTrainerCallback

    return WiringTrainerCallback(wiring, **options)


def check_equal(model: nn.Module, other: nn.Module) -> None:
    """The states of two models are the same, bit by bit."""
    ours, theirs = model.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert torch.equal(theirs[name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_models_are_trained_saved_wired_again_and_finalized(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    keys = list(model.state_dict())
    rule = rules.get("rigl", every=1, end=1.0, schedule={"kind": "linear", "end": 1.0})
    wiring = wirings.wire_(model, rule, density=0.2)
    loop = trainer(model, kind, tmp_path / "run", callback(wiring, finalize=False), save_strategy="steps", save_steps=2)
    loop.train()
    assert wiring.steps == wiring.planned == 3
    assert loop.evaluate()["eval_loss"] > 0
    wired = logits(model, kind)
    if kind in GENERATES:
        settings = {"max_new_tokens": 6, "do_sample": False}
        text = model.generate(TOKENS[:, :4], **settings)
    model.save_pretrained(tmp_path / "wired")
    for folder in (tmp_path / "wired", tmp_path / "run" / "checkpoint-3"):
        other = auto(kind).from_pretrained(folder)
        torch.testing.assert_close(logits(other, kind), wired)  # the network in use, though it is not wired
        again = wirings.rewire_(other, folder)
        assert torch.equal(logits(other, kind), wired)
        check_equal(model, other)
        assert again.state_dict() == wiring.state_dict()
        assert vars(again.rule) == vars(rule)
        for name, mask in wiring.masks().items():
            assert torch.equal(again.masks()[name], mask)
    second = auto(kind).from_pretrained(tmp_path / "run" / "checkpoint-2")
    assert wirings.rewire_(second, tmp_path / "run" / "checkpoint-2").steps == 2

    edges = {report.name: report.edges for report in wiring.report()}
    wirings.finalize_(model)
    assert list(model.state_dict()) == keys
    assert "save_pretrained" not in vars(model)
    model.save_pretrained(tmp_path / "final")
    plain = auto(kind).from_pretrained(tmp_path / "final")
    torch.testing.assert_close(logits(plain, kind), wired)
    assert {name: int(plain.state_dict()[name].count_nonzero()) for name in edges} == edges
    if kind in GENERATES:
        assert torch.equal(model.generate(TOKENS[:, :4], **settings), text)
        assert torch.equal(plain.generate(TOKENS[:, :4], **settings), text)
    with pytest.raises(WiringError, match="was not wired when it was saved"):
        wirings.rewire_(plain, tmp_path / "final")


@pytest.mark.parametrize("rule", ["dnw", "str", "gmp", "dense"])
def test_trainer_resumes_from_a_checkpoint_with_its_wiring(rule: str, tmp_path: Path) -> None:
    def run(steps: int, folder: str, resume: bool = False) -> nn.Module:
        model = make("gpt2")
        options = {"every": 1, "steps": 4} if rule == "gmp" else {}
        budget = {} if rule == "dense" else {"density": 0.2, "share": "erk"}
        wiring = wirings.wire_(model, rules.get(rule, **options), **budget, skip=["lm_head"])
        ours = callback(wiring, finalize=False)
        loop = trainer(model, "gpt2", tmp_path / folder, ours, steps=steps, save_strategy="steps", save_steps=2)
        loop.train(resume_from_checkpoint=resume)
        return model

    whole = run(4, "whole")
    run(2, "parts")
    check_equal(whole, run(4, "parts", resume=True))


def test_the_trained_model_can_train_on_after_it_was_wired_again(tmp_path: Path) -> None:
    model = make("llama")
    wiring = wirings.wire_(model, "random", density=wirings.LinearSchedule.over(1.0, 0.2))
    trainer(model, "llama", tmp_path, callback(wiring, finalize=False), steps=2).train()
    model.save_pretrained(tmp_path)
    other = auto("llama").from_pretrained(tmp_path)
    again = wirings.rewire_(other, tmp_path)
    for one, handle in ((model, wiring), (other, again)):
        trainer(one, "llama", tmp_path, callback(handle), steps=2).train()
    check_equal(model, other)


def test_a_wired_model_of_several_files_with_masks_and_tied_weights(tmp_path: Path) -> None:
    model = make("gpt2")
    allowed = {"transformer.wte": torch.rand(64, 32) < 0.7}
    wirings.wire_(model, "set", density=0.3, allowed=allowed)
    copied = copy.deepcopy(model)
    for one, folder in ((model, tmp_path / "one"), (copied, tmp_path / "copy")):
        one.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        other = auto("gpt2").from_pretrained(folder)
        again = wirings.rewire_(other, folder)
        check_equal(model, other)
        assert again.layers[0].name == "transformer.wte.weight"
        assert torch.equal(again.layers[0].edges.allowed, allowed["transformer.wte"])
        assert other.lm_head.weight.count_nonzero() <= again.layers[0].edges.k


def with_two_wirings(folder: Path) -> Any:
    """A model that was saved with two wirings."""
    model = make("bert")
    wirings.wire_(model, "random", density=0.2, include=["bert.encoder.layer.0"])
    wirings.wire_(model, "dnw", density=0.5, include=["bert.encoder.layer.1"])
    model.save_pretrained(folder)
    return model


def test_two_wirings_are_restored_one_by_one(tmp_path: Path) -> None:
    model = with_two_wirings(tmp_path)
    other = auto("bert").from_pretrained(tmp_path)
    with pytest.raises(WiringError, match=r"has 2 wirings\. Restore one after the other: .* in model\.config\.wirings"):
        wirings.rewire_(other, tmp_path)
    handles = [wirings.rewire_(other, description, tmp_path) for description in other.config.wirings]
    assert [handle.rule.name for handle in handles] == ["random", "dnw"]
    check_equal(model, other)


def test_descriptions_stay_in_the_config_until_all_are_restored(tmp_path: Path) -> None:
    model = with_two_wirings(tmp_path)
    other = auto("bert").from_pretrained(tmp_path)
    found = copy.deepcopy(other.config.wirings)
    wirings.rewire_(other, other.config.wirings[0], tmp_path)
    assert other.config.wirings == found
    with pytest.raises(WiringError, match="saved with rule None"):
        wirings.rewire_(other, {**found[1], "state": {}}, tmp_path)
    assert other.config.wirings == found
    wirings.rewire_(other, other.config.wirings[1], tmp_path)
    assert not hasattr(other.config, "wirings")
    check_equal(model, other)


def test_all_weights_are_restored_in_a_new_model(tmp_path: Path) -> None:
    model = make("gpt2")
    wirings.wire_(model, density=0.2, skip=["lm_head"])
    model.save_pretrained(tmp_path)
    other = make("gpt2", seed=1)
    wirings.rewire_(other, tmp_path)
    check_equal(model, other)
    assert other.lm_head.weight is other.transformer.wte.weight


EXPERTS = {  # the shapes of a model's stacks, and those of their receiving nodes
    "mixtral": [((4, 128, 32), (4, 128, 1)), ((4, 32, 64), (4, 32, 1))],
    "qwen3_moe": [((4, 96, 32), (4, 96, 1)), ((4, 32, 48), (4, 32, 1))],
    "gpt_oss": [((4, 32, 128), (4, 1, 128)), ((4, 64, 32), (4, 1, 32))],
    "llama4_text": [((4, 32, 128), (4, 1, 128)), ((4, 64, 32), (4, 1, 32))],
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_are_wired_in_their_orientation(kind: str) -> None:
    model = make(kind)
    wiring = wirings.wire_(model, structure="2:4", skip=["lm_head"])
    stacks = [layer for layer in wiring.layers if layer.weight.dim() == 3]
    assert [(tuple(layer.weight.shape), tuple(layer.receivers().shape)) for layer in stacks[:2]] == EXPERTS[kind]
    for layer in stacks:
        inputs = layer.edges.real(layer.weight).movedim(layer.edges.inputs, -1)
        assert inputs.unflatten(-1, (-1, 4)).sum(-1).eq(2).all(), "2 of every 4 inputs of a node of an expert"
    total = sum(p.numel() for p in model.parameters())
    assert sum(report.possible for report in wiring.report()) > 0.85 * total
    row = next(row for row in wirings.profile(model, TOKENS).rows if row.kind.endswith("Experts"))
    used = TOKENS.numel() * (4 if kind == "llama4_text" else 2)  # every expert, or two of four for a token
    assert row.dense_mult_adds == used * sum(layer.weight[0].numel() for layer in stacks[:2])
    assert row.mult_adds == row.dense_mult_adds // 2


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_implementations_of_experts_see_the_same_wiring(implementation: str) -> None:
    model = make("mixtral")
    wirings.wire_(model, density=0.2)
    plain = wirings.finalize_(copy.deepcopy(model))
    model.set_experts_implementation(implementation)
    torch.testing.assert_close(logits(model, "mixtral"), logits(plain, "mixtral"))


def check_finalized(model: Any, kind: str, folder: Path) -> Any:
    """The model in a folder is the finalized network, bit by bit; returns it."""
    loaded, final = auto(kind).from_pretrained(folder), wirings.finalize_(copy.deepcopy(model))
    check_equal(final, loaded)
    torch.testing.assert_close(logits(loaded, kind), logits(model, kind))
    return loaded


def test_a_wired_part_is_saved_with_the_whole_model(tmp_path: Path) -> None:
    lm = make("gpt2")
    wiring = wirings.wire_(lm.transformer, "rigl", budget={"h.0": 0.2, "h.1.mlp": wirings.ConstantSchedule(0.3)})
    copied = copy.deepcopy(lm)
    for one, folder in ((lm, tmp_path / "one"), (copied, tmp_path / "copy")):
        one.save_pretrained(folder)
        outer = check_finalized(lm, "gpt2", folder)
        again = wirings.rewire_(outer, folder)
        assert again.layers[0].name == "transformer.h.0.attn.c_attn.weight"
        check_equal(lm, outer)
        inner = auto("gpt2").from_pretrained(folder)
        again = wirings.rewire_(inner.transformer, folder)
        assert [layer.name for layer in again.layers] == [layer.name for layer in wiring.layers]
        check_equal(lm, inner)
        assert not hasattr(inner.config, "wirings")
        inner.save_pretrained(tmp_path / "again")
        check_finalized(lm, "gpt2", tmp_path / "again")

    wirings.unwire_(lm)
    lm.save_pretrained(tmp_path / "plain")
    assert "wirings" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    check_equal(lm, auto("gpt2").from_pretrained(tmp_path / "plain"))
    check_equal(lm, pickle.loads(pickle.dumps(lm)))
    assert not any("wirings" in name for module in lm.modules() for name in vars(module))
    copied.save_pretrained(tmp_path / "copy")  # still wired
    check_finalized(copied, "gpt2", tmp_path / "copy")


def test_trainer_saves_the_wiring_of_a_part(tmp_path: Path) -> None:
    model = make("llama")
    wiring = wirings.wire_(model.model.layers, "random", density=0.2)  # a ModuleList, which cannot be saved alone
    loop = trainer(model, "llama", tmp_path, callback(wiring, finalize=False), steps=1)
    loop.train()
    loop.save_model(tmp_path)
    other = check_finalized(model, "llama", tmp_path)
    again = wirings.rewire_(other, tmp_path)
    assert again.layers[0].name == "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(logits(other, "llama"), logits(model, "llama"))
    other = auto("llama").from_pretrained(tmp_path)
    assert wirings.rewire_(other.model.layers, tmp_path).steps == 1
    check_equal(model, other)


def test_two_parts_are_wired_each_by_its_own_rule(tmp_path: Path) -> None:
    model = make("t5")
    wirings.wire_(model.encoder, "random", density=0.2)
    wirings.wire_(model.decoder, "dnw", density=0.4)
    model.save_pretrained(tmp_path)
    other = check_finalized(model, "t5", tmp_path)
    first, second = other.config.wirings
    wirings.rewire_(other.encoder, first, tmp_path)
    wirings.rewire_(other, second, tmp_path)
    check_equal(model, other)


def test_a_part_of_a_wired_model_is_saved_as_the_network_in_use(tmp_path: Path) -> None:
    model = make("bert")
    wirings.wire_(model, "dnw", density=0.2)
    with pytest.warns(UserWarning, match="without a description of its wiring.*was wired as a part of a larger model"):
        model.bert.save_pretrained(tmp_path)
    loaded = type(model.bert).from_pretrained(tmp_path, add_pooling_layer=False)
    check_equal(wirings.finalize_(model).bert, loaded)


@pytest.mark.parametrize("name", rules.names())
def test_models_wired_by_any_rule_are_saved(name: str, tmp_path: Path) -> None:
    model, rule = make("llama"), rules.get(name, **OPTIONS.get(name, {}))
    wirings.wire_(model, rule, **({} if rule.own_budget else {"density": 0.2}))
    model.save_pretrained(tmp_path)
    other = check_finalized(model, "llama", tmp_path)
    wirings.rewire_(other, tmp_path)
    check_equal(model, other)


def test_rejects_folders_that_hold_no_wiring(tmp_path: Path) -> None:
    model = make("llama")
    wiring = wirings.wire_(model, "random", density=0.2)
    model.save_pretrained(tmp_path)
    other = auto("llama").from_pretrained(tmp_path)
    with pytest.raises(WiringError, match="takes no state"):
        wirings.rewire_(other, tmp_path, model.state_dict())
    with pytest.raises(WiringError, match=r"expected a local folder that save_pretrained has written.*'some/name'"):
        wirings.rewire_(other, "some/name")
    wider = make("llama", hidden_size=64)
    with pytest.raises(WiringError, match=r"has shape \(64, 64\), but \(32, 32\) in the saved wiring"):
        wirings.rewire_(wider, tmp_path)
    with pytest.raises(WiringError, match=r"LlamaModel has no weight .* as it was when saved, a LlamaForCausalLM"):
        wirings.rewire_(make("llama").model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["wirings"][0]["format"] = 7
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WiringError, match=r"in format 7, .* upgrade wirings"):
        wirings.rewire_(other, tmp_path)
    other.save_pretrained(tmp_path / "plain")  # its config still has what was loaded
    with pytest.raises(WiringError, match="but the weights were saved from a plain model"):
        wirings.rewire_(other, wiring.describe(), tmp_path / "plain")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WiringError, match=r"has no weights: model\.safetensors is missing"):
        wirings.rewire_(other, wiring.describe(), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WiringError, match=r"config\.json is not valid JSON"):
        wirings.rewire_(other, tmp_path)


def test_a_rule_that_cannot_be_described_is_saved_with_a_warning(tmp_path: Path) -> None:
    class Own(rules.Random):
        name = "own"

    model = make("bert")
    wirings.wire_(model, Own(), density=0.2)
    with pytest.warns(UserWarning, match="saved without a description of its wiring"):
        model.save_pretrained(tmp_path)
    other = make("bert", seed=1)
    wirings.wire_(other, Own(), density=0.2)
    from safetensors.torch import load_file

    other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert torch.equal(logits(other, "bert"), logits(model, "bert"))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5", "mixtral"])
def test_gradient_checkpointing_gives_the_same_gradients(kind: str) -> None:
    def gradients(checkpointing: bool) -> list[torch.Tensor]:
        model = make(kind).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing
        wirings.wire_(model, "soft_threshold", density=0.2, share="global")
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, recomputed = gradients(False), gradients(True)
    assert len(plain) == len(recomputed) > 10
    for one, other in zip(plain, recomputed, strict=True):
        torch.testing.assert_close(other, one)


def test_embeddings_tied_to_a_skipped_head_stay_dense_and_tied() -> None:
    model = make("gpt2")
    before = model.transformer.wte.weight.detach().clone()
    wiring = wirings.wire_(model, density=0.1, skip=["lm_head"])
    assert not any("wte" in layer.name or "lm_head" in layer.name for layer in wiring.layers)
    assert model.lm_head.weight is model.transformer.wte.weight
    wirings.finalize_(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert torch.equal(model.transformer.wte.weight, before)


def test_functional_call_of_a_wired_model() -> None:
    model = make("gpt2")
    wirings.wire_(model, density=0.2, skip=["lm_head"])
    expected = logits(model, "gpt2")
    parameters = dict(model.named_parameters())
    found = torch.func.functional_call(model, parameters, (), {"input_ids": TOKENS}).logits
    torch.testing.assert_close(found.detach(), expected)
    gradient = torch.func.grad(
        lambda p: torch.func.functional_call(model, p, (), {"input_ids": TOKENS, "labels": TOKENS}).loss
    )(parameters)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(gradient[name], parameter.grad)


def test_fine_tuning_example(tmp_path: Path) -> None:
    bits, model = runpy.run_path(str(ROOT / "examples" / "finetune_gpt.py"))["main"](steps=12, folder=tmp_path)
    assert bits < 8
    final = auto("gpt2").from_pretrained(tmp_path / "final")
    check_equal(model, final)
    layers = [layer for block in model.transformer.h for layer in (block.attn.c_attn, block.mlp.c_fc)]
    assert all(int(layer.weight.count_nonzero()) <= 0.1 * layer.weight.numel() for layer in layers)
    assert model.transformer.wte.weight.count_nonzero() == model.transformer.wte.weight.numel()
