"""Tensors in files: places of edges as Rice codes, values exact or rounded."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wirings import WiringError
from wirings.utils.encoded_tensors import ROUNDED, check_description, decode, decoded_bytes, encode, rounding_type
from wirings.utils.gap_code import MAX_BITS, pack_places, unpack_places


def test_a_code_by_hand() -> None:
    # Gaps 1, 0, 5, 2. With 1 bit: remainders 1, 0, 1, 0; quotients 0, 0, 2, 1 are 1, 1, 001, 01, from the right.
    bits, code = pack_places(np.array([1, 2, 8, 11]))
    assert (bits, code.tolist()) == (1, [0b0101, 0b1010011])
    assert unpack_places(code, 1, 4, 12).tolist() == [1, 2, 8, 11]
    mask = np.array([0b00000110, 0b1001], np.uint8)  # without remainders
    assert unpack_places(mask, 0, 4, 12).tolist() == [1, 2, 8, 11]
    assert pack_places(np.array([1, 2, 4, 7]))[1].tolist() == [0b10010110]
    assert pack_places(np.zeros(0, np.int64))[1].tolist() == []
    assert unpack_places(np.zeros(0, np.uint8), 0, 0, 0).tolist() == []


@given(st.lists(st.integers(0, 2**45), max_size=40), st.integers(0, 8))
@settings(max_examples=200, deadline=None)
def test_places_come_back(gaps: list[int], shift: int) -> None:
    gaps = [gap >> 45 - shift * 2 for gap in gaps]
    places = np.cumsum(np.array(gaps, np.int64) + 1) - 1
    size = int(places[-1]) + 1 if gaps else 0
    bits, code = pack_places(places)
    assert np.array_equal(unpack_places(code, bits, len(gaps), size), places)
    for other in range(MAX_BITS):  # no other number of bits is shorter
        length = -(-len(gaps) * other // 8) - (-sum((gap >> other) + 1 for gap in gaps) // 8)
        assert len(code) <= length + 1
    if gaps:
        with pytest.raises(WiringError, match="expected places of"):
            unpack_places(code, bits, len(gaps), size - 1)


@given(st.binary(max_size=40), st.integers(-1, 40), st.integers(-1, 400), st.integers(0, 500))
@settings(max_examples=500, deadline=None)
def test_any_bytes_are_places_or_refused(raw: bytes, bits: int, count: int, size: int) -> None:
    try:
        places = unpack_places(np.frombuffer(raw, np.uint8), bits, count, size)
    except WiringError:
        return
    assert len(places) == count
    assert not count or 0 <= places[0] <= places[-1] < size
    assert (np.diff(places) > 0).all()


@pytest.mark.parametrize(
    ("density", "bytes_per_edge"), [(0.5, 0.251), (0.2, 0.47), (0.1, 0.61), (0.05, 0.74), (0.02, 0.91), (0.01, 1.03)]
)
def test_bytes_of_a_place(density: float, bytes_per_edge: float) -> None:
    rng = np.random.default_rng(0)
    random = rng.random(10**6) < density
    live = np.repeat(rng.random(1000) < 0.6, 1000)  # whole rows are empty
    clustered = live & (rng.random(10**6) < density / 0.6)
    for mask, least in ((random, 0.9), (clustered, 0.8)):
        places = np.flatnonzero(mask)
        length = len(pack_places(places)[1]) / len(places)
        assert least * bytes_per_edge < length < 1.03 * bytes_per_edge


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same bit for bit."""
    return one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


shapes = st.lists(st.integers(0, 9), max_size=4).filter(lambda shape: np.prod(shape) < 2000)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64, torch.bool, torch.uint8])


def random_tensor(shape: list[int], dtype: torch.dtype, density: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 50
    x = x * (torch.rand(shape, generator=generator) < density)
    return torch.where(x == 0, 0.0, x).to(dtype)


@given(shapes, dtypes, st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0]), st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_tensors_come_back_bit_for_bit(shape: list[int], dtype: torch.dtype, density: float, seed: int) -> None:
    x = random_tensor([*shape, 7], dtype, density, seed)
    parts, about = encode(x)
    if about is None:
        assert same(parts[""], x)
        return
    check_description(about)
    again, places = decode(parts, about)
    assert same(again, x)
    assert places is not None
    assert torch.equal(places, x.reshape(-1).nonzero().squeeze(1))
    assert decoded_bytes(about) == x.nbytes
    assert sum(part.nbytes for part in parts.values()) < x.nbytes


@given(shapes, st.sampled_from(ROUNDED), st.sampled_from([0.02, 0.3, 0.9, 1.0]), st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_weights_are_rounded(shape: list[int], dtype: str, density: float, seed: int) -> None:
    x = random_tensor([*[max(n, 1) for n in shape], 3, 30], torch.float64, density, seed)
    x.view(-1)[::7] *= 1e-9
    parts, about = encode(x, dtype)
    assert about is not None
    again, places = decode(parts, about)
    assert again.dtype == x.dtype
    assert torch.equal(again != 0, x != 0), "no edge is lost"
    assert places is None or len(places) == int(x.count_nonzero())
    step = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8, "int8": 0.0}[dtype] * x.abs()
    if dtype == "int8":
        step = x.abs().flatten(1).amax(1).view(-1, *[1] * (x.dim() - 1)) / 127
    assert ((again - x).abs() <= 1.01 * step + 6e-8).all()
    assert sum(part.nbytes for part in parts.values()) < x.nbytes


def test_unusual_values_are_kept() -> None:
    x = torch.zeros(40, 40)
    x[0, :6] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-45, -0.0, 3e38])
    parts, about = encode(x)
    assert about is not None
    expected = torch.where(x == 0, 0.0, x)  # -0.0 is zero, and so it is no edge
    assert same(decode(parts, about)[0], expected)
    for dtype in ("float16", "int8"):  # these cannot represent all of them
        assert encode(x, dtype)[0]["values"].dtype == torch.float32
    assert encode(x, "bfloat16")[0]["values"].dtype == torch.bfloat16
    x[0, 0] = 0.0
    assert encode(x, "int8")[0]["values"].dtype == torch.float32
    tiny = torch.full((20, 20), 1e-42) * torch.eye(20)
    for dtype in ("float16", "bfloat16", "int8"):
        parts, about = encode(tiny, dtype)
        assert about is not None
        assert torch.equal(decode(parts, about)[0] != 0, tiny != 0)


def test_dense_tensors_vectors_and_small_ones_stay_as_they_are() -> None:
    for x in (torch.randn(30, 30), torch.eye(4), torch.tensor(0.0), torch.zeros(0, 3), torch.arange(90)):
        assert encode(x)[1] is None
    assert encode(torch.zeros(0, 3), "int8")[1] is None
    for x in (torch.randn(300), torch.arange(900).view(30, 30), torch.randn(30, 30, dtype=torch.float16)):
        assert encode(x, "float16")[1] is None
    assert encode(torch.randn(30, 30), "int8")[0].keys() == {"values", "scales"}


def test_edges_that_weigh_zero_are_stored_on_request() -> None:
    x, edges = torch.zeros(4, 5), torch.zeros(4, 5, dtype=torch.bool)
    edges[1, 2:] = True
    x[1, 3] = 2.0
    for dtype in (None, *ROUNDED):
        parts, about = encode(x, dtype, edges)
        assert about is not None
        again, places = decode(parts, about)
        assert torch.equal(again, x)
        assert places is not None
        assert places.tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 31},
        {"bits": -1},
        {"shape": [9, 9]},
        {"dtype": "int64"},
        {"values": torch.zeros(3)},
        {"values": torch.zeros(81, dtype=torch.int64)},
        {"places": torch.zeros(3)},
        {"places": torch.zeros(0, dtype=torch.uint8)},
        {"places": torch.full((40,), 255, dtype=torch.uint8)},
        {"scales": torch.zeros(100)},
        {"scales": torch.zeros(0)},
    ],
)
def test_parts_that_do_not_match_are_refused(change: dict[str, Any]) -> None:
    x = random_tensor([100, 100], torch.float32, 0.02, 0)
    parts, about = encode(x)
    assert about is not None
    assert same(decode(parts, about)[0], x)
    parts |= {key: value for key, value in change.items() if key not in about}
    about |= {key: value for key, value in change.items() if key in about}
    with pytest.raises(WiringError, match="expected "):
        decode(parts, about)


@pytest.mark.parametrize(
    "about",
    [
        None,
        [],
        {"shape": [2]},
        {"shape": [2], "dtype": "float32", "more": 1},
        {"shape": [2], "dtype": "complex64"},
        {"shape": [-1], "dtype": "float32"},
        {"shape": [True], "dtype": "float32"},
        {"shape": [2**30, 2**30], "dtype": "float32"},
        {"shape": [1] * 17, "dtype": "float32"},
        {"shape": 3, "dtype": "float32"},
        {"shape": [2], "dtype": {}},
        {"shape": [2], "dtype": "float32", "bits": True},
    ],
)
def test_invalid_descriptions_are_refused(about: Any) -> None:
    with pytest.raises(WiringError, match="expected tensors with a shape"):
        check_description(about)


def test_types_to_round_to() -> None:
    assert rounding_type(torch.float16) == rounding_type("float16") == "float16"
    assert rounding_type(None) is None
    with pytest.raises(WiringError, match=r"unknown dtype 'int4'. Did you mean 'int8'"):
        rounding_type("int4")
    with pytest.raises(WiringError, match=r"expected a dense tensor of type .*complex64"):
        encode(torch.zeros(2, dtype=torch.complex64))


def test_ten_million_edges_take_seconds() -> None:
    x = torch.zeros(10_000, 5_000)
    x.view(-1)[torch.randint(x.numel(), (11_000_000,))] = 1.5
    start = time.perf_counter()
    parts, about = encode(x, "int8")
    assert about is not None
    again = decode(parts, about)[0]
    assert time.perf_counter() - start < 20  # about 2 s on one core
    assert torch.equal(again != 0, x != 0)
    assert int(again.count_nonzero()) > 9_000_000
