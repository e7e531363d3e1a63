"""Networks of torchvision, timm and Hugging Face are wired, trained for a few steps and finalized.

Tests are skipped if their package cannot be imported.
"""

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vision import MISSING

import wirings
from wirings import rules
from wirings.profiling import profile

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of these packages are not our concern
IMAGES, LABELS = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 1])
TOKENS = torch.randint(0, 60, (4, 12))


def package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        pytest.skip(f"pip install {name}: {error}")


def vision(name: str, **options: Any) -> nn.Module:
    if MISSING is not None:
        pytest.skip(MISSING)
    return getattr(package("torchvision").models, name)(weights=None, num_classes=3, **options)


def timm(name: str, **options: Any) -> nn.Module:
    return package("timm").create_model(name, pretrained=False, num_classes=3, **options)


def hugging_face(kind: str, **options: Any) -> nn.Module:
    transformers = package("transformers")
    small: dict[str, Any] = {
        "bert": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        "llama": {
            **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        },
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
        "vit": {
            **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"image_size": 32, "patch_size": 8},
        },
    }[kind]
    if kind != "vit":
        small |= {"vocab_size": 64}
    config = transformers.AutoConfig.for_model(kind, num_labels=3, **small)
    made = {
        "bert": transformers.AutoModelForSequenceClassification,
        "llama": transformers.AutoModelForCausalLM,
        "gpt2": transformers.AutoModelForCausalLM,
        "vit": transformers.AutoModelForImageClassification,
    }[kind]
    return made.from_config(config)


class Recurrent(nn.Module):
    """PyTorch's own layers: an embedding, a bidirectional LSTM, attention over its outputs, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, bidirectional=True, batch_first=True)
        self.attention = nn.MultiheadAttention(48, 4, batch_first=True)
        self.head = nn.Linear(48, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(self.attention(states, states, states)[0].mean(1))


def of_images(model: nn.Module) -> Tensor:
    found: Any = model(IMAGES)
    return nn.functional.cross_entropy(getattr(found, "logits", found), LABELS)


def of_tokens(model: nn.Module) -> Tensor:
    found: Any = model(TOKENS)
    return nn.functional.cross_entropy(getattr(found, "logits", found), LABELS)


def next_token(model: Any) -> Tensor:
    return model(input_ids=TOKENS, labels=TOKENS).loss


Case = tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], dict[str, Any], int]
CASES: dict[str, Case] = {  # constructor, loss, arguments of wire_, number of wired weights
    "torchvision resnet18": (lambda: vision("resnet18"), of_images, {"skip": ["conv1", "fc"]}, 19),
    "torchvision vit": (
        lambda: package("torchvision").models.VisionTransformer(
            image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=3
        ),
        of_images,
        {"skip": ["conv_proj", "heads"]},
        8,
    ),
    "timm resnet10t": (lambda: timm("resnet10t"), of_images, {}, 15),
    "timm convnext_atto": (lambda: timm("convnext_atto"), of_images, {"skip": ["stem.0", "head"]}, 39),
    "timm vit_tiny": (
        lambda: timm("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3),
        of_images,
        {"skip": ["patch_embed", "head"]},
        12,
    ),
    "hugging face bert": (lambda: hugging_face("bert"), of_tokens, {"skip": ["classifier"]}, 13),
    "hugging face llama": (lambda: hugging_face("llama"), next_token, {"skip": ["lm_head"]}, 14),
    # GPT-2's layers have a class of their own, and its head is tied to the token embedding.
    "hugging face gpt2": (lambda: hugging_face("gpt2"), next_token, {}, 9),
    "hugging face vit": (lambda: hugging_face("vit"), of_images, {}, 14),
    "lstm and attention": (Recurrent, of_tokens, {}, 11),
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", CASES)
def test_networks_are_wired_trained_and_finalized(name: str, optimizer: str) -> None:
    make, loss_of, arguments, weights = CASES[name]
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    keys = list(model.state_dict())
    wiring = wirings.wire_(model, "dnw", density=0.2, **arguments)
    assert len(wiring.layers) == weights, [layer.name for layer in wiring.layers]
    assert list(model.state_dict()) == keys
    steps = (
        torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        if optimizer == "sgd"
        else torch.optim.AdamW(model.parameters(), 1e-3)
    )
    before = [layer.weight.detach().clone() for layer in wiring.layers]
    losses = []
    for _ in range(5):
        loss = loss_of(model)
        steps.zero_grad()
        loss.backward()
        steps.step()
        wiring.step(steps)
        losses.append(loss.item())
    assert min(losses[1:]) < losses[0]
    for layer, was in zip(wiring.layers, before, strict=True):
        hallucinated = ~layer.edges.real(layer.weight)
        assert (layer.weight - was)[hallucinated].abs().max() > 0, f"{layer.name}: hallucinated edges must move"
    plain.load_state_dict(model.state_dict())  # checkpoints of the wired network load into the plain one
    reports = {report.name: report.edges for report in wiring.look()}
    model.eval()
    with torch.no_grad():
        wired = loss_of(model)
        wirings.finalize_(model)
        torch.testing.assert_close(loss_of(model), wired)
    assert list(model.state_dict()) == keys
    for key, edges in reports.items():
        weight = model.state_dict()[key]
        assert int(weight.count_nonzero()) == edges == max(1, int(0.2 * weight.numel() + 1e-9))
    assert type(model) is type(plain)


def test_finalized_transformer_survives_save_and_load(tmp_path: Path) -> None:
    model: Any = hugging_face("gpt2")
    wiring = wirings.wire_(model, density=0.2)
    assert wiring.layers[0].name == "transformer.wte.weight", "tied to lm_head"
    wirings.finalize_(model.eval())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    assert int(again.lm_head.weight.count_nonzero()) == int(0.2 * 64 * 32)


def test_transposed_weights_are_profiled_and_reported_by_node() -> None:
    model: Any = hugging_face("gpt2")
    plain = profile(model, TOKENS).mult_adds
    wiring = wirings.wire_(model, rules.get("targeted_dropout", regular=True), density=0.25, skip=["lm_head"])
    layer = next(layer for layer in wiring.layers if layer.name.endswith("0.mlp.c_fc.weight"))
    assert tuple(layer.weight.shape) == (32, 128)
    assert layer.receivers().expand(32, 128)[5].tolist() == list(range(128))
    with torch.no_grad():
        layer.weight[:, 3] = 0.001  # node 3 receives only weak edges, node 7 sends only weak edges
        layer.weight[7] = 1e-6
    real = wiring.masks()[layer.name]
    assert real.sum(0).tolist() == [8] * 128, "every node keeps a quarter of its inputs"
    wirings.unwire_(model)
    wiring = wirings.wire_(model, "dnw", density=0.25, skip=["lm_head"])
    report = next(report for report in wiring.look() if report.name == layer.name)
    assert (report.without_input, report.without_output) == (1, 1)
    tokens, edges = TOKENS.numel(), sum(layer.weight.numel() for layer in wiring.layers)
    kept = sum(report.edges for report in wiring.look())
    assert plain - profile(model, TOKENS).mult_adds == tokens * (edges - kept)


def test_checkpoint_of_a_wired_transformer_loads_as_the_network_in_use(tmp_path: Path) -> None:
    model: Any = hugging_face("bert")
    wirings.wire_(model, density=0.2)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    finalized = wirings.finalize_(model)
    for name, value in finalized.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
