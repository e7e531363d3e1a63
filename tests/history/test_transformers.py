"""The structure of transformers: blocks, kinds of layers and heads, found by names and shapes; dead heads."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import wirings
from wirings import WiringError
from wirings.history import History, file_format, snapshot_of
from wirings.history.blocks import WeightMatrix, column_name, find_transformer
from wirings.history.heads import TransformerCounts, count_edges
from wirings.history.structure import NodeGroup, RecordedLayer, RecordedTile, WiringStructure
from wirings.models import get

ATTENTION, MLP = ["q", "k", "v", "out"], ["MLP in", "MLP out"]
CROSS = [f"cross {kind}" for kind in ATTENTION]
FAMILIES: dict[str, tuple[dict[str, tuple[int, int]], list[str], list[str]]] = {
    # (outputs, inputs) of the weights; "#" is the number of a block; names of blocks; columns
    "GPT-2": (
        {
            "transformer.h.#.attn.c_attn.weight": (96, 32),
            "transformer.h.#.attn.c_proj.weight": (32, 32),
            "transformer.h.#.mlp.c_fc.weight": (128, 32),
            "transformer.h.#.mlp.c_proj.weight": (32, 128),
        },
        ["block 0", "block 1"],
        [*ATTENTION, *MLP],
    ),
    "BERT": (
        {
            "bert.encoder.layer.#.attention.self.query.weight": (32, 32),
            "bert.encoder.layer.#.attention.self.key.weight": (32, 32),
            "bert.encoder.layer.#.attention.self.value.weight": (32, 32),
            "bert.encoder.layer.#.attention.output.dense.weight": (32, 32),
            "bert.encoder.layer.#.intermediate.dense.weight": (64, 32),
            "bert.encoder.layer.#.output.dense.weight": (32, 64),
        },
        ["block 0", "block 1"],
        [*ATTENTION, *MLP],
    ),
    "Llama": (
        {
            "model.layers.#.self_attn.q_proj.weight": (32, 32),
            "model.layers.#.self_attn.k_proj.weight": (16, 32),
            "model.layers.#.self_attn.v_proj.weight": (16, 32),
            "model.layers.#.self_attn.o_proj.weight": (32, 32),
            "model.layers.#.mlp.gate_proj.weight": (64, 32),
            "model.layers.#.mlp.up_proj.weight": (64, 32),
            "model.layers.#.mlp.down_proj.weight": (32, 64),
        },
        ["block 0", "block 1"],
        [*ATTENTION, "MLP gate", *MLP],
    ),
    "DeepSeek, whose queries have a low rank, the inner width of its shared expert": (
        {
            "model.layers.#.self_attn.q_a_proj.weight": (16, 32),
            "model.layers.#.self_attn.q_b_proj.weight": (64, 16),
            "model.layers.#.self_attn.kv_a_proj_with_mqa.weight": (24, 32),
            "model.layers.#.self_attn.kv_b_proj.weight": (64, 16),
            "model.layers.#.self_attn.o_proj.weight": (32, 32),
            "model.layers.#.mlp.shared_experts.gate_proj.weight": (16, 32),
            "model.layers.#.mlp.shared_experts.up_proj.weight": (16, 32),
            "model.layers.#.mlp.shared_experts.down_proj.weight": (32, 16),
        },
        ["block 0", "block 1"],
        [*ATTENTION, "MLP gate", *MLP],
    ),
    "Phi-3, whose output projection comes first": (
        {
            "model.layers.#.self_attn.o_proj.weight": (32, 32),
            "model.layers.#.self_attn.qkv_proj.weight": (64, 32),
            "model.layers.#.mlp.gate_up_proj.weight": (96, 32),
            "model.layers.#.mlp.down_proj.weight": (32, 48),
        },
        ["block 0", "block 1"],
        [*ATTENTION, *MLP],
    ),
    "timm": (
        {
            "blocks.#.attn.qkv.weight": (96, 32),
            "blocks.#.attn.proj.weight": (32, 32),
            "blocks.#.mlp.fc1.weight": (128, 32),
            "blocks.#.mlp.fc2.weight": (32, 128),
        },
        ["block 0", "block 1"],
        [*ATTENTION, *MLP],
    ),
    "T5": (
        {
            "decoder.block.#.layer.0.SelfAttention.q.weight": (32, 32),
            "decoder.block.#.layer.0.SelfAttention.k.weight": (32, 32),
            "decoder.block.#.layer.0.SelfAttention.v.weight": (32, 32),
            "decoder.block.#.layer.0.SelfAttention.o.weight": (32, 32),
            "decoder.block.#.layer.1.EncDecAttention.q.weight": (32, 32),
            "decoder.block.#.layer.1.EncDecAttention.k.weight": (32, 32),
            "decoder.block.#.layer.1.EncDecAttention.v.weight": (32, 32),
            "decoder.block.#.layer.1.EncDecAttention.o.weight": (32, 32),
            "decoder.block.#.layer.2.DenseReluDense.wi.weight": (64, 32),
            "decoder.block.#.layer.2.DenseReluDense.wo.weight": (32, 64),
        },
        ["block 0", "block 1"],
        [*ATTENTION, *CROSS, *MLP],
    ),
    "no module of their own": (
        {
            "stages.#.wq": (32, 32),
            "stages.#.wk": (32, 32),
            "stages.#.wv": (32, 32),
            "stages.#.wo": (32, 32),
            "stages.#.gate": (32, 32),
            "stages.#.fc1": (32, 32),
            "stages.#.fc2": (32, 32),
        },
        ["block 0", "block 1"],
        [*ATTENTION, "MLP gate", *MLP],
    ),
}


def matrices(layers: dict[str, tuple[int, int]]) -> list[WeightMatrix]:
    names = [(name.replace("#", str(block)), size) for block in range(2) for name, size in layers.items()]
    return [WeightMatrix(name, gives, takes, gives * takes) for name, (gives, takes) in names]


@pytest.mark.parametrize("family", FAMILIES)
def test_finds_blocks_and_kinds_by_names_and_shapes(family: str) -> None:
    layers, blocks, columns = FAMILIES[family]
    head = WeightMatrix("lm_head.weight", 5_000, 32, 160_000)  # larger than all blocks together
    found = find_transformer([*matrices(layers), head], {})
    assert found is not None
    assert found.blocks == blocks
    assert [column_name(*column) for column in found.columns] == columns
    assert found.outside == [2 * len(layers)]
    assert sum(cell.edges for cell in found.cells) == sum(matrix.edges for matrix in matrices(layers))
    assert all(attention.heads == 0 for attention in found.attentions)


def test_the_output_projection_is_that_of_the_attention() -> None:
    layers = next(layers for family, (layers, _, _) in FAMILIES.items() if family.startswith("DeepSeek"))
    found = find_transformer(matrices(layers), {})
    assert found is not None
    assert [attention.parts["out"][0] for attention in found.attentions] == [4, 12]  # o_proj


def test_splits_fused_projections_by_heads() -> None:
    names = {"Phi-3, whose output projection comes first": "self_attn.qkv_proj", "timm": "attn.qkv"}
    phi, timm = (
        find_transformer(made, {matrix.name: 4 for matrix in made if name in matrix.name})
        for family, name in names.items()
        for made in [matrices(FAMILIES[family][0])]
    )
    assert phi is not None
    assert timm is not None
    assert [(one.heads, one.key_heads) for one in phi.attentions + timm.attentions] == [(4, 2)] * 2 + [(4, 4)] * 2
    parts = {kind: (int(own[0]), len(own)) for kind, (_, own) in phi.attentions[0].parts.items()}
    assert parts == {"q": (0, 32), "k": (32, 16), "v": (48, 16), "out": (0, 32)}
    by_head = {"h.#.attention.query_key_value": (12, 4), "h.#.attention.dense": (4, 4)}
    found = find_transformer(matrices(by_head), {f"h.{i}.attention.query_key_value": 2 for i in range(2)})
    assert found is not None  # the order of GPT-NeoX: queries, keys and values of head 0, then those of head 1
    assert found.attentions[0].parts["k"][1].tolist() == [2, 3, 8, 9]


def test_other_networks_are_not_transformers() -> None:
    assert snapshot_of(get("resnet18", rule="dnw", density=0.1)).structure.transformer is None
    assert snapshot_of(wirings.StaticGraph([4, 8, 3], edges=20)).structure.transformer is None
    pooled = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64), nn.MultiheadAttention(16, 2))
    wirings.wire_(pooled, density=0.5)
    assert snapshot_of(pooled).structure.transformer is None


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def decoder(width: int = 8, heads: int = 2, blocks: int = 2) -> nn.ModuleDict:
    stack = nn.ModuleList(Block(width, heads) for _ in range(blocks))
    return nn.ModuleDict({"blocks": stack, "head": nn.Linear(width, 5)})


def test_structure_of_a_recorded_model(tmp_path: Path) -> None:
    model = decoder()
    wiring = wirings.wire_(model, density=0.5)
    history = History.load(wirings.Recorder(wiring).save(tmp_path / "x.wirings"))
    found = history.structure.transformer
    assert found is not None
    assert (found.blocks, found.attentions[1].heads, found.outside) == (["block 0", "block 1"], 2, [8])
    groups = {group.name: group for group in history.structure.groups}
    tiles = history.structure.tiles
    assert tiles[1].sources == groups["blocks.0.attn.qkv"].start + 16  # the output projection reads the values
    assert tiles[2].sources == groups["blocks.0.attn.proj"].start
    assert tiles[4].sources == groups["blocks.0.mlp.2"].start


def test_queries_keys_and_values_read_the_same_nodes() -> None:
    layers = {name: nn.Linear(8, 8) for name in ("q", "k", "v", "out", "fc1", "fc2")}
    model = nn.ModuleList([nn.ModuleDict(layers)])
    wirings.wire_(model, density=0.5)
    structure = snapshot_of(model).structure
    assert [group.name for group in structure.groups] == ["0.q in", "0.q", "0.k", "0.v", "0.out", "0.fc1", "0.fc2"]
    assert [tile.sources // 8 for tile in structure.tiles] == [0, 0, 0, 3, 4, 5]


def test_histories_of_earlier_releases_open_and_are_continued(tmp_path: Path) -> None:
    model = decoder()
    wiring = wirings.wire_(model, density=0.5)
    recorder = wirings.Recorder(wiring, every=1)
    recorder.step()
    history = recorder.history()
    data = history.structure.to_json()
    del data["heads"]
    data["tiles"][1] |= {"sources": 0, "cols": 4, "inner": 2}  # the guess of earlier releases
    old = History(WiringStructure.from_json(data), history.about, history.chunks)
    read = History.load(old.save(tmp_path / "old.wirings"))
    found = read.structure.transformer
    assert found is not None
    assert found.attentions[0].heads == 0
    assert read.structure.with_heads(2).transformer.attentions[0].heads == 2  # type: ignore[union-attr]
    with pytest.raises(WiringError, match=r"qkv.weight of shape \(24, 8\) cannot be split into 3 heads"):
        read.structure.with_heads(3)
    resumed = wirings.Recorder(wiring, every=1, resume=read, step=1)
    resumed.step()
    assert resumed.history().steps == [0, 1, 2]
    assert resumed.history().structure.heads == history.structure.heads
    with pytest.raises(WiringError, match="no blocks with attention"):
        snapshot_of(wirings.StaticGraph([4, 8, 3], edges=20)).structure.with_heads(2)


def with_edges(qkv: torch.Tensor, proj: torch.Tensor) -> TransformerCounts:
    """The counts of a decoder in which all edges are real except in the first block's attention."""
    model = decoder()
    wirings.wire_(model, density=1.0)
    structure = snapshot_of(model).structure
    codes = np.ones(structure.size, np.int8)
    for layer, mask in zip(structure.layers[:2], (qkv, proj), strict=True):
        codes[layer.start : layer.stop] = mask.reshape(-1).numpy()
    history = History(structure, {}, [file_format.pack_record(0, np.zeros_like(codes), codes)])
    return count_edges(structure, history.states())


def test_counts_edges_of_heads_and_finds_dead_ones() -> None:
    qkv, out = torch.ones(24, 8), torch.ones(8, 8)
    qkv[0:4] = 0  # the queries of head 0
    qkv[2, 3] = 1  # but one
    qkv[20:24, :] = 0  # the values of head 1
    counts = with_edges(qkv, out)
    first, second = counts.heads
    assert first.edges[0].tolist() == [[1, 32, 32, 32], [32, 32, 0, 32]]
    assert first.possible.tolist() == [32, 32, 32, 32]
    assert first.missing == [["", "v"]]
    assert second.missing == [["", ""]]
    assert counts.live_heads().tolist() == [3]
    grid = counts.densities()[0]
    assert grid[0].tolist() == [100 * 33 / 64, 100, 50, 100, 100, 100]
    assert counts.column_densities()[0, 0] == 100 * 97 / 128


@pytest.mark.parametrize(
    ("rows", "columns", "missing"),
    [
        (slice(0, 4), slice(0), ["q", ""]),
        (slice(8, 16), slice(0), ["k", "k"]),
        (slice(0), slice(4, 8), ["", "out"]),
        (slice(0, 4), slice(0, 4), ["q, out", ""]),
        ([16, 17], [2, 3], ["path", ""]),  # values 0 and 1 have no edge, and the output reads only these
    ],
)
def test_says_what_dead_heads_lack(rows: Any, columns: Any, missing: list[str]) -> None:
    qkv, out = torch.ones(24, 8), torch.ones(8, 8)
    qkv[rows], out[:, columns] = 0, 0
    assert with_edges(qkv, out).heads[0].missing == [missing]


def test_heads_that_share_keys_and_values() -> None:
    shapes = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8)}
    layers, start = [], 0
    for name, shape in shapes.items():
        layers.append(RecordedLayer(f"0.attn.{name}", start, start + shape[0] * shape[1], shape))
        start = layers[-1].stop
    tiles = [RecordedTile(layer.start, 8, layer.shape[0], 0, 8) for layer in layers]
    nodes = np.arange(8)
    structure = WiringStructure(16, [NodeGroup("all", 0, 16)], layers, tiles, nodes, nodes, heads={"0.attn.q": 4})
    codes = np.ones(start, np.int8)
    codes[layers[2].start : layers[2].start + 16] = 0  # the first half of the values, which two heads share
    history = History(structure, {}, [file_format.pack_record(0, np.zeros_like(codes), codes)])
    counts = count_edges(structure, history.states())
    assert counts.heads[0].missing == [["v", "v", "", ""]]
    assert counts.heads[0].edges[0, 2].tolist() == [16, 16, 16, 16]


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama", "vit"])
def test_hugging_face(kind: str) -> None:
    importlib.import_module("vision")  # transformers imports torchvision if it is installed
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2} if kind == "llama" else {}
    small |= {"image_size": 32, "patch_size": 8} if kind == "vit" else {"vocab_size": 64}
    small = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64} if kind == "gpt2" else small
    auto = transformers.AutoModelForImageClassification if kind == "vit" else transformers.AutoModelForCausalLM
    model = auto.from_config(transformers.AutoConfig.for_model(kind, **small))
    wirings.wire_(model, density=0.5)
    state = snapshot_of(model).state()
    found = state.structure.transformer
    assert found is not None
    assert found.blocks == ["block 0", "block 1"]
    gate = ["MLP gate"] if kind == "llama" else []
    assert [column_name(*column) for column in found.columns] == [*ATTENTION, *gate, *MLP]
    assert [(one.heads, one.key_heads) for one in found.attentions] == [(4, 2 if kind == "llama" else 4)] * 2
    counts = count_edges(state.structure, [state])
    total = counts.real.sum() + counts.outside.sum()
    assert total == len(state)


@pytest.mark.parametrize("layers", ["encoder", "decoder"])
def test_pytorch_layers(layers: str) -> None:
    size: dict[str, Any] = {"d_model": 16, "nhead": 4, "dim_feedforward": 32, "batch_first": True}
    model: nn.Module = nn.TransformerEncoder(nn.TransformerEncoderLayer(**size), 3)
    if layers == "decoder":
        model = nn.TransformerDecoder(nn.TransformerDecoderLayer(**size), 3)
    wirings.wire_(model, density=0.5)
    found = snapshot_of(model).structure.transformer
    assert found is not None
    assert found.blocks == ["block 0", "block 1", "block 2"]
    cross = CROSS if layers == "decoder" else []
    assert [column_name(*column) for column in found.columns] == [*ATTENTION, *cross, *MLP]
    assert {one.heads for one in found.attentions} == {4}
