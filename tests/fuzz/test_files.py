"""Damaged and malicious files raise WiringError."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.fuzz import files
from wirings import WiringError, engine, load_compact
from wirings.compaction.program import Program


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.sound(tmp_path_factory.mktemp("sound"), "compact")[0]


def written(folder: Path, tensors: dict[str, Tensor], about: Any) -> Path:
    path = folder / "crafted.safetensors"
    path.write_bytes(files.bytes_with(tensors, about, "3" if "sparse" in about else "4"))
    return path


def about_of(*operations: dict[str, Any], inputs: Any = None, **more: Any) -> dict[str, Any]:
    outputs = [operations[-1]["output"]]
    given: dict[str, Any] = {"inputs": inputs or {"x": [4]}, "operations": list(operations), "outputs": outputs}
    return {**given, **({} if "sparse" in more else {"encoded": {}}), "bytes": 0, "notes": {}, **more}


def opaque(output: str, target: str, *arguments: Any, inputs: tuple[str, ...] = ("x",), **options: Any) -> Any:
    given = {"operation": "TorchOperator", "output": output, "inputs": list(inputs), "target": target}
    return {**given, "arguments": list(arguments), "options": [list(x) for x in options.items()], "channelwise": False}


X: Any = {"InputRef": 0}


@pytest.mark.parametrize("value", [-1, -3, 0, 1, 1000, True, 0.5, "x"])
@pytest.mark.parametrize(
    ("target", "more", "name"),
    [
        ("aten::clone", (), "memory_format"),
        ("aten::zeros_like", (), "dtype"),
        ("aten::zeros_like", (), "layout"),
        ("aten::zeros_like", (), "device"),
        ("aten::log_softmax.int", (1,), "dtype"),
        ("aten::to.dtype", (), "dtype"),
    ],
)
def test_numbers_instead_of_constants_are_refused(
    target: str, more: tuple[int, ...], name: str, value: Any, tmp_path: Path
) -> None:
    path = written(tmp_path, {}, about_of(opaque("y", target, X, *more, **{name: value})))
    for load in (load_compact, engine.load):
        with pytest.raises(WiringError, match=rf"expected a torch\.\w+ as {name}"):
            load(path)


@pytest.mark.parametrize("most", ["x", float("nan"), -1, True, [1]])
def test_rejects_invalid_limits_without_blaming_the_file(most: Any, sound: Path) -> None:
    for load in (load_compact, engine.load):
        with pytest.raises(WiringError, match="max_bytes must be a number of at least 0, got"):
            load(sound, max_bytes=most)


def test_folders_and_pipes_are_not_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(WiringError, match="is not a file"):
            load_compact(path)


def test_valid_crafted_file_loads(tmp_path: Path) -> None:
    path = written(tmp_path, {}, about_of(opaque("y", "aten::exp", X)))
    assert torch.equal(load_compact(path)(torch.zeros(2, 4)), torch.ones(2, 4))


def test_checksum_covers_the_whole_file(sound: Path, tmp_path: Path) -> None:
    tensors, about = files.opened(sound)
    load_compact(written(tmp_path, tensors, about))
    raw = files.bytes_with(tensors, about)
    for old, new in ((b"head", b"haed"), (b'"F32"', b'"I32"'), (b"Conv", b"conV"), (raw[-4:], b"\1\2\3\4")):
        (tmp_path / "changed.safetensors").write_bytes(raw.replace(old, new))
        with pytest.raises(WiringError, match=r"changed\.safetensors cannot be read.*damaged.*Export the model again"):
            load_compact(tmp_path / "changed.safetensors")


def test_files_without_a_checksum_are_refused(sound: Path, tmp_path: Path) -> None:
    tensors, about = files.opened(sound)
    header = {"format": "wirings program", "schema": "1", "program": json.dumps(about)}
    save_file(tensors, tmp_path / "old.safetensors", header)
    with pytest.raises(WiringError, match=r"has schema '1', but this version reads 3 and 4.*Export the model again"):
        load_compact(tmp_path / "old.safetensors")
    save_file(tensors, tmp_path / "old.safetensors", {**header, "schema": "4"})
    with pytest.raises(WiringError, match="checksum"):
        load_compact(tmp_path / "old.safetensors")


@pytest.mark.parametrize(
    "operations",
    [
        [
            opaque("s", "aten::_sparse_coo_tensor_unsafe", {"WeightRef": 0}, X, [4]),
            opaque("y", "aten::to_dense", X, inputs=("s",)),
        ],
        [opaque("y", "aten::max_pool2d_with_indices_backward", X, X, [2], [2], [0], [1], False, {"WeightRef": 0})],
        [opaque("y", "aten::as_strided", X, [2, 4], [10**6, 1])],
        [opaque("y", "aten::_unsafe_view", X, [-1])],
        [opaque("y", "aten::empty_like", X)],
        [opaque("y", "aten::from_file", "z")],
    ],
)
def test_other_operators_are_refused(operations: list[Any], tmp_path: Path) -> None:
    path = written(tmp_path, {}, about_of(*operations))
    with pytest.raises(WiringError, match=r"the operator 'aten::\w+' is not allowed in a file"):
        load_compact(path)


def test_attention_does_not_read_missing_values(tmp_path: Path) -> None:
    """PyTorch's CPU kernel reads as many values as there are keys."""
    cut = opaque("v", "aten::slice.Tensor", X, 1, 0, 1)
    attend = opaque("y", "aten::scaled_dot_product_attention", X, X, {"InputRef": 1}, inputs=("x", "v"))
    path = written(tmp_path, {}, about_of(cut, attend, inputs={"x": [64, 8]}))
    with pytest.raises(WiringError, match="as many values as keys"):
        load_compact(path)


@pytest.mark.parametrize(
    ("operations", "why"),
    [
        ([opaque("n", "pow", 9, 10**9), opaque("y", "aten::exp", X)], "exponent"),
        ([opaque("n", "mul", [1], 10**9), opaque("y", "aten::exp", X)], "expects numbers"),
        ([opaque("n", "mul", 2**62, 2**62), opaque("y", "aten::exp", X)], "63 bits"),
        ([opaque("y", "aten::ones", [10**5, 10**5])], "maps of at most"),
        ([opaque("y", "aten::repeat", X, [1, 10**12])], "maps of at most|expected"),
        ([opaque("n", "aten::ones", [10**6, 1]), opaque("y", "aten::unbind.int", X, inputs=("n",))], "65536 parts"),
        ([opaque("y", "aten::exp", {"InputRef": 1})], "from 0 to 0"),
        ([opaque("y", "aten::exp", {"InputRef": -1})], "from 0 to 0"),
        ([opaque("y", "aten::exp", {"WeightRef": 0})], "an argument's number"),
        ([opaque("y", "aten::exp", X, inputs=("z",))], "computed before"),
        ([opaque("x", "aten::exp", X)], "unique name"),
        ([opaque("y", "aten::_to_copy", X, device={"device": "cuda"})], "on the CPU"),
        ([{"operation": "Activation", "output": "y", "inputs": ["x"], "kind": "eval", "values": []}], "one of relu"),
        ([{"operation": "Activation", "output": "y", "inputs": ["x"], "kind": 3, "values": []}], "Activation.kind"),
        ([{"operation": "Reshape", "output": "y", "inputs": ["x"], "shape": [-1]}], "0 or more"),
        ([{"operation": "Linear", "output": "y", "inputs": ["x"]}], "the weights of 'y'"),
    ],
)  # fmt: skip
def test_demands_of_a_crafted_file_are_bounded(operations: list[Any], why: str, tmp_path: Path) -> None:
    path = written(tmp_path, {}, about_of(*operations))
    with pytest.raises(WiringError, match=f"crafted.safetensors cannot be read: .*({why}).*Export the model again"):
        load_compact(path)


def test_claimed_sizes_are_checked_before_memory_is_taken(tmp_path: Path) -> None:
    linear = {"operation": "Linear", "output": "y", "inputs": ["x"]}
    places, values = torch.zeros(1, dtype=torch.int32), torch.ones(1)
    tensors, size = {"y.weight.places": places, "y.weight.values": values}, 60_000 * 30_000 * 4
    more = {"inputs": {"x": [30_000]}, "sparse": {"y.weight": [60_000, 30_000]}}
    path = written(tmp_path, tensors, about_of(linear, **more, bytes=size))
    assert path.stat().st_size < 5_000
    with pytest.raises(WiringError, match=r"at most 67,108,864 bytes, got 7,200,000,000; pass max_bytes"):
        load_compact(path)
    path = written(tmp_path, tensors, about_of(linear, **more, bytes=4))
    with pytest.raises(WiringError, match="as recorded"):
        load_compact(path)
    more = {"inputs": {"x": [3000]}, "sparse": {"y.weight": [6000, 3000]}, "bytes": 4 * 6000 * 3000}
    path = written(tmp_path, tensors, about_of(linear, **more))
    with pytest.raises(WiringError, match="pass max_bytes"):
        load_compact(path)
    assert load_compact(path, max_bytes=10**8)(torch.ones(1, 3000))[0, 0] == 1


@pytest.mark.parametrize("places", [[-1], [4], [2, 1], [1, 1]])
def test_places_of_sparse_weights_are_checked(places: list[int], tmp_path: Path) -> None:
    linear = {"operation": "Linear", "output": "y", "inputs": ["x"]}
    tensors = {"y.weight.places": torch.tensor(places, dtype=torch.int32), "y.weight.values": torch.ones(len(places))}
    path = written(tmp_path, tensors, about_of(linear, sparse={"y.weight": [1, 4]}, bytes=16))
    with pytest.raises(WiringError, match=r"places from 0 to 3|a value for each place"):
        load_compact(path)


def test_claimed_sizes_of_encoded_weights_are_checked_before_memory_is_taken(tmp_path: Path) -> None:
    linear = {"operation": "Linear", "output": "y", "inputs": ["x"]}
    code = torch.tensor([1], dtype=torch.uint8)
    for values, scales in (
        (torch.ones(1), {}),
        (torch.ones(1, dtype=torch.int8), {"y.weight.scales": torch.ones(60_000)}),
    ):
        tensors = {"y.weight.places": code, "y.weight.values": values, **scales}
        encoded = {"y.weight": {"shape": [60_000, 30_000], "dtype": "float32", "bits": 0}}
        more = {"inputs": {"x": [30_000]}, "encoded": encoded, "bytes": 60_000 * 30_000 * 4}
        path = written(tmp_path, tensors, about_of(linear, **more))
        with pytest.raises(WiringError, match=r"at most [\d,]+ bytes, got 7,200,000,000; pass max_bytes"):
            load_compact(path)
        path = written(tmp_path, tensors, about_of(linear, **{**more, "bytes": 4}))
        with pytest.raises(WiringError, match="as recorded"):
            load_compact(path)


@pytest.mark.parametrize("code", [[], [0], [3], [16], [1, 0], [0, 1]])
def test_places_of_encoded_weights_are_checked(code: list[int], tmp_path: Path) -> None:
    linear = {"operation": "Linear", "output": "y", "inputs": ["x"]}
    tensors = {"y.weight.places": torch.tensor(code, dtype=torch.uint8), "y.weight.values": torch.ones(1)}
    encoded = {"y.weight": {"shape": [1, 4], "dtype": "float32", "bits": 0}}
    path = written(tmp_path, tensors, about_of(linear, encoded=encoded, bytes=16))
    with pytest.raises(WiringError, match="expected places of 1 edges among 4 weights"):
        load_compact(path)
    tensors["y.weight.places"] = torch.tensor([8], dtype=torch.uint8)
    path = written(tmp_path, tensors, about_of(linear, encoded=encoded, bytes=16))
    assert load_compact(path)(torch.tensor([[1.0, 2.0, 3.0, 5.0]])) == 5


@pytest.mark.parametrize("index", [[-1], [4], [2**40]])
def test_channel_indices_are_checked(index: list[int], tmp_path: Path) -> None:
    select = {"operation": "SelectChannels", "output": "y", "inputs": ["x"]}
    path = written(tmp_path, {"y.index": torch.tensor(index)}, about_of(select, bytes=8))
    with pytest.raises(WiringError, match="an index from 0 to 3"):
        load_compact(path)


def test_threads_in_a_file_are_limited(tmp_path: Path) -> None:
    about = about_of(opaque("y", "aten::exp", X))
    about["notes"]["engine"] = {"engine": "torch", "threads": 1000, "processor": "", "steps": []}
    assert engine.load(written(tmp_path, {}, about)).threads == torch.get_num_threads()
    for wrong in (0, -1, True, "2", 1.5, 5000):
        about["notes"]["engine"]["threads"] = wrong
        with pytest.raises(WiringError, match=r"crafted.safetensors cannot be read: threads must be "):
            engine.load(written(tmp_path, {}, about))
    with pytest.raises(WiringError, match=r"^threads must be"):
        engine.load(written(tmp_path, {}, about_of(opaque("y", "aten::exp", X))), threads=0)


@pytest.mark.parametrize("text", ["[" * 100_000, "", "nope", "[]", '{"inputs": ' + "9" * 10_000 + "}"])
def test_invalid_json_is_refused(text: str, tmp_path: Path) -> None:
    header = {"format": "wirings program", "schema": "4", "program": text}
    save_file({}, tmp_path / "odd.safetensors", {**header, "checksum": files.checksum({}, header)})
    with pytest.raises(WiringError, match=re.escape("odd.safetensors cannot be read")):
        Program.load(tmp_path / "odd.safetensors")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("scalar", [False, True])
def test_integers_are_not_divided_toward_zero(dtype: torch.dtype, scalar: bool, tmp_path: Path) -> None:
    """The smallest integer divided by -1 would end the process, before any exception."""
    numbers = (torch.iinfo(dtype).min, -1)
    weights = {f"y.held{n}": torch.tensor([number], dtype=dtype) for n, number in enumerate(numbers)}
    target, other = ("aten::div.Scalar_mode", -1) if scalar else ("aten::div.Tensor_mode", {"WeightRef": 1})
    divided = opaque("y", target, {"WeightRef": 0}, other, rounding_mode="trunc")
    added = opaque("z", "aten::add.Tensor", X, {"InputRef": 1}, inputs=("x", "y"))
    sizes = sum(x.nbytes for x in weights.values())
    path = written(tmp_path, weights, about_of(divided, added, bytes=sizes))
    with pytest.raises(WiringError, match="floating-point numbers to round toward zero"):
        load_compact(path)


def test_memory_within_an_operator_counts(tmp_path: Path) -> None:
    """The products of all pairs of rows are made on the way to a single number."""
    rows = 60_000
    weights = {f"y.held{n}": torch.zeros(rows, *([1] if n < 2 else [])) for n in range(4)}
    product = opaque("y", "aten::einsum", "ab,cb,a,c->", [{"WeightRef": n} for n in range(4)])
    added = opaque("z", "aten::add.Tensor", X, {"InputRef": 1}, inputs=("x", "y"))
    sizes = sum(x.nbytes for x in weights.values())
    path = written(tmp_path, weights, about_of(product, added, bytes=sizes))
    with pytest.raises(WiringError, match="maps of at most"):
        load_compact(path)


def test_missing_memory_is_not_blamed_on_the_file(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr("wirings.compaction.file_format.read_tensors", read)
    with pytest.raises(WiringError, match=r"sound\S* cannot be read: there is not enough memory for it") as raised:
        load_compact(sound)
    assert "Export" not in str(raised.value)
