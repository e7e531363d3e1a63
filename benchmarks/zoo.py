"""Networks that were written elsewhere, made from their configurations with random weights, for `benchmarks.networks`.

Each entry returns a model in evaluation mode and an example input. Large networks have fewer layers than published.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Made = tuple[nn.Module, Any]
NETWORKS: dict[str, Callable[[], Made]] = {}
"""By title."""
TOKENS = 128


def _network(title: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def register(make: Callable[[], Made]) -> Callable[[], Made]:
        NETWORKS[title] = make
        return make

    return register


# ---- torchvision and timm -------------------------------------------------------------------------------------------


def _torchvision(name: str, pixels: int = 224, **options: Any) -> Made:
    importlib.import_module("tests.vision")  # torchvision's extension may not match the installed PyTorch
    models = importlib.import_module("torchvision.models")
    return models.get_model(name, weights=None, **options), torch.randn(1, 3, pixels, pixels)


def _timm(name: str, pixels: int = 224, **options: Any) -> Made:
    importlib.import_module("tests.vision")
    timm = importlib.import_module("timm")
    return timm.create_model(name, pretrained=False, **options), torch.randn(1, 3, pixels, pixels)


for _title, _name, _options in (
    ("ResNet18", "resnet18", {}),
    ("ResNet50", "resnet50", {}),
    ("MobileNetV2", "mobilenet_v2", {}),
    ("MobileNetV3-Small", "mobilenet_v3_small", {}),
    ("EfficientNet-B0", "efficientnet_b0", {}),
    ("RegNetY-400MF", "regnet_y_400mf", {}),
    ("ShuffleNetV2 ×0.5", "shufflenet_v2_x0_5", {}),
    ("DenseNet121", "densenet121", {}),
    ("GoogLeNet", "googlenet", {"init_weights": False, "aux_logits": False}),
    ("ConvNeXt-Tiny", "convnext_tiny", {}),
    ("Swin-T", "swin_t", {}),
):
    NETWORKS[f"{_title}, torchvision"] = lambda name=_name, options=_options: _torchvision(name, **options)  # type: ignore[misc]

for _title, _name, _options in (
    ("ViT-Tiny/16", "vit_tiny_patch16_224", {}),
    ("DeiT-Tiny/16", "deit_tiny_patch16_224", {}),
    ("Mixer-S/16", "mixer_s16_224", {}),
    ("LeViT-128S", "levit_128s", {}),
    ("EfficientViT-B0", "efficientvit_b0", {}),
    ("EfficientViT-M0", "efficientvit_m0", {}),
    ("ResNet26-D", "resnet26d", {}),
):
    NETWORKS[f"{_title}, timm"] = lambda name=_name, options=_options: _timm(name, **options)  # type: ignore[misc]


# ---- transformers ---------------------------------------------------------------------------------------------------


def _transformers(config: str, model: str, **options: Any) -> nn.Module:
    importlib.import_module("tests.vision")  # it imports torchvision, too, if that is installed
    transformers = importlib.import_module("transformers")
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    return made


def _tokens(count: int, tokens: int = TOKENS) -> Tensor:
    return torch.randint(1, count, (1, tokens))


@_network("BERT, 4 layers × 256, transformers")
def bert() -> Made:
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    model = _transformers("BertConfig", "BertModel", vocab_size=1000, **sizes)
    ids = _tokens(1000)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@_network("GPT-2, 4 layers × 256, transformers")
def gpt2() -> Made:
    sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 256}
    model = _transformers("GPT2Config", "GPT2LMHeadModel", vocab_size=1000, **sizes)
    return model, {"input_ids": _tokens(1000), "use_cache": False}


_LLAMA = {
    "vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 768, "max_position_embeddings": 256,
}  # fmt: skip


@_network("Llama, 4 layers × 256, transformers")
def llama() -> Made:
    return _transformers("LlamaConfig", "LlamaForCausalLM", **_LLAMA), {"input_ids": _tokens(1000), "use_cache": False}


@_network("Mixtral, 2 layers × 256, 4 experts, transformers")
def mixtral() -> Made:
    sizes = {**_LLAMA, "num_hidden_layers": 2, "num_local_experts": 4}
    model = _transformers("MixtralConfig", "MixtralForCausalLM", **sizes)
    return model, {"input_ids": _tokens(1000, 32), "use_cache": False}


@_network("T5, 2 + 2 layers × 256, transformers")
def t5() -> Made:
    sizes = {"d_model": 256, "num_layers": 2, "num_heads": 4, "d_ff": 1024, "d_kv": 64}
    model = _transformers("T5Config", "T5ForConditionalGeneration", vocab_size=1000, **sizes)
    return model, {"input_ids": _tokens(1000), "decoder_input_ids": _tokens(1000, 32), "use_cache": False}


@_network("Whisper, 2 + 2 layers × 256, transformers")
def whisper() -> Made:
    sizes = {
        "d_model": 256, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024, "max_source_positions": 150,
        "max_target_positions": 64, "vocab_size": 1000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1, "suppress_tokens": [], "begin_suppress_tokens": [],
    }  # fmt: skip
    model = _transformers("WhisperConfig", "WhisperForConditionalGeneration", **sizes)
    features, ids = torch.randn(1, 80, 300), _tokens(1000, 32)
    return model, {"input_features": features, "decoder_input_ids": ids, "use_cache": False}


@_network("ViT, 4 layers × 192, transformers")
def vit() -> Made:
    sizes = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 768}
    model = _transformers("ViTConfig", "ViTForImageClassification", image_size=224, num_labels=1000, **sizes)
    return model, {"pixel_values": torch.randn(1, 3, 224, 224)}


# ---- diffusers ------------------------------------------------------------------------------------------------------


def _diffusers(model: str, **options: Any) -> nn.Module:
    importlib.import_module("tests.vision")
    made: nn.Module = getattr(importlib.import_module("diffusers"), model)(**options)
    return made


@_network("UNet2DModel, 32 px, diffusers")
def diffusers_unet() -> Made:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    model = _diffusers("UNet2DModel", sample_size=32, block_out_channels=(64, 128), layers_per_block=1, **blocks)
    return model, {"sample": torch.randn(1, 3, 32, 32), "timestep": torch.tensor([10])}


@_network("UNet2DConditionModel, 32 px, diffusers")
def diffusers_conditional_unet() -> Made:
    model = _diffusers(
        "UNet2DConditionModel", sample_size=32, block_out_channels=(64, 128), layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64, attention_head_dim=4,
    )  # fmt: skip
    text = torch.randn(1, 16, 64)
    return model, {"sample": torch.randn(1, 4, 32, 32), "timestep": torch.tensor([10]), "encoder_hidden_states": text}


# ---- written here ---------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    """A residual block of a diffusion model, with an embedding of the time step."""

    def __init__(self, into: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, into), nn.Conv2d(into, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.norm2, self.conv2 = nn.GroupNorm(8, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(into, out, 1) if into != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))  # type: ignore[no-any-return]


class _ImageAttention(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(8, channels)
        self.into, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.into(self.norm(x)).view(b, 3, self.heads, c // self.heads, h * w).transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(-1, -2).reshape(b, c, h, w))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """A UNet as in diffusion models: (batch, 3, 32, 32) and a time step each."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        time = 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down1, self.pool = _Block(width, width, time), nn.Conv2d(width, width, 3, 2, 1)
        self.down2, self.middle, self.attend = _Block(width, 2 * width, time), _Block(2 * width, 2 * width, time), (
            _ImageAttention(2 * width, 4)
        )  # fmt: skip
        self.up2, self.up1 = _Block(4 * width, 2 * width, time), _Block(3 * width, width, time)
        self.last = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))
        self.register_buffer("frequencies", torch.exp(-9.2 * torch.arange(width // 2) / (width // 2)))

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        angles = steps[:, None] * self.frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        one = self.down1(self.first(x), time)
        two = self.down2(self.pool(one), time)
        y = self.attend(self.middle(two, time))
        y = F.interpolate(self.up2(torch.cat([y, two], 1), time), scale_factor=2.0, mode="nearest")
        return self.last(self.up1(torch.cat([y, one], 1), time))  # type: ignore[no-any-return]


@_network("UNet with attention, 32 px")
def unet() -> Made:
    return UNet(), (torch.randn(1, 3, 32, 32), torch.rand(1))


class Tagger(nn.Module):
    """An LSTM over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, 128), nn.Linear(256, 20)
        self.lstm = nn.LSTM(128, 256, num_layers=2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])  # type: ignore[no-any-return]


@_network("LSTM, 2 layers × 256")
def lstm() -> Made:
    return Tagger(), _tokens(1000, 32)


class GraphNetwork(nn.Module):
    """Messages between the nodes of a graph, whose edges are (2, edges) indices of nodes."""

    def __init__(self, features: int = 32, width: int = 128) -> None:
        super().__init__()
        self.first = nn.Linear(features, width)
        self.messages = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 7)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = F.relu(self.first(nodes))
        for message, own in zip(self.messages, self.own, strict=True):
            sent = torch.zeros_like(x).index_add_(0, edges[1], message(x)[edges[0]])
            x = F.relu(own(x) + sent)
        return self.head(x)  # type: ignore[no-any-return]


@_network("graph network, 100 nodes")
def graph_network() -> Made:
    return GraphNetwork(), (torch.randn(100, 32), torch.randint(100, (2, 400)))


class OneGraph(nn.Module):
    """A graph network whose inputs have a batch dimension of one, which `wirings.compact` asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.network = GraphNetwork()

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        return self.network(nodes[0], edges[0])[None]  # type: ignore[no-any-return]


@_network("graph network, 100 nodes, in a batch of one")
def one_graph() -> Made:
    return OneGraph(), (torch.randn(1, 100, 32), torch.randint(100, (1, 2, 400)))


@_network("nn.Transformer, 2 + 2 layers × 256")
def transformer() -> Made:
    model = nn.Transformer(256, 4, 2, 2, 1024, batch_first=True)
    return model, (torch.randn(1, 64, 256), torch.randn(1, 32, 256))


@_network("nn.TransformerEncoder, 4 layers × 256")
def encoder() -> Made:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(1, TOKENS, 256)
