"""Data kept on the device: augmentation matches a naive reference; order, ranks and CUDA graph capture."""

import inspect

import numpy as np
import pytest
import torch
from kernels import without_waiting
from torch import Tensor

from wirings.errors import WiringError
from wirings.train.data.device import DeviceLoader, device_loaders

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)


def images(count: int = 50, height: int = 6, width: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (count, 3, height, width), generator=generator, dtype=torch.uint8)
    return pixels, torch.arange(count) * 3


def loader(count: int = 50, batch: int = 8, **settings: object) -> DeviceLoader:
    return DeviceLoader(*images(count), **{"batch": batch, "mean": MEAN, "std": STD, "shuffle": True, **settings})


def test_signatures_require_mean_and_std() -> None:
    parameters = inspect.signature(device_loaders).parameters
    assert parameters["mean"].default is parameters["std"].default is inspect.Parameter.empty
    assert parameters["peak"].default == inspect.signature(DeviceLoader).parameters["peak"].default


def whole(batches: object) -> tuple[Tensor, Tensor]:
    x, y = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(y)


def reference(pixels: Tensor, dy: int, dx: int, flip: int, padding: int) -> Tensor:
    """Pad with black, crop, flip, scale to [0, 1] and normalise one image, as the usual transforms do."""
    channels, height, width = pixels.shape
    padded = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=torch.uint8)
    padded[:, padding : padding + height, padding : padding + width] = pixels
    cut = padded[:, dy : dy + height, dx : dx + width]
    cut = cut.flip(2) if flip else cut
    return (cut.double() / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


@pytest.mark.parametrize(("padding", "flip"), [(0, False), (0, True), (2, False), (4, True)])
def test_matches_the_reference(padding: int, flip: bool) -> None:
    pixels, labels = images()
    data = loader(padding=padding, flip=flip)
    x, y = whole(data.epoch(3))
    assert (x.dtype, y.dtype, x.is_contiguous()) == (torch.float32, torch.int64, True)
    for at, (example, dy, dx, flipped) in enumerate(zip(*data.draw(3), strict=True)):
        expected = reference(pixels[example], dy, dx, flipped, padding)
        assert y[at] == labels[example]
        assert torch.allclose(x[at].double(), expected, atol=1e-5)


def test_cutout_hides_a_square_and_changes_nothing_else() -> None:
    plain, data = loader(padding=2, flip=True), loader(padding=2, flip=True, cutout=3)
    x, _ = whole(plain.epoch(1))
    cut, _ = whole(data.epoch(1))
    for at, (top, left) in enumerate(data.draw_squares(1).T):
        expected = x[at].clone()
        expected[:, max(top, 0) : top + 3, max(left, 0) : left + 3] = 0
        assert torch.equal(cut[at], expected)
    assert data.draw_squares(1).min() == -1
    assert not np.array_equal(data.draw_squares(1), data.draw_squares(2))


def test_padding_is_black_before_it_is_normalised() -> None:
    white = torch.full((200, 1, 2, 2), 255, dtype=torch.uint8)
    data = DeviceLoader(white, torch.zeros(200), batch=200, mean=[0.5], std=[0.5], padding=1)
    x, _ = next(data.epoch(0))
    assert x.unique().tolist() == [-1, 1]


def test_peak_is_the_largest_pixel_value() -> None:
    data = DeviceLoader(
        torch.full((1, 1, 1, 1), 16, dtype=torch.uint8), torch.zeros(1), batch=1, mean=[0], std=[0.5], peak=16
    )
    assert next(data.epoch(0))[0].item() == 2


def test_crops_and_flips_are_uniform_and_independent() -> None:
    count, padding = 90_000, 1
    pixels = torch.zeros(count, 1, 1, 1, dtype=torch.uint8)
    data = DeviceLoader(pixels, torch.zeros(count), batch=count, mean=[0], std=[1], padding=padding, flip=True)
    plan = data.draw(0)
    cells = np.bincount(plan.dy * 6 + plan.dx * 2 + plan.flip, minlength=18)
    # 18 equal cells: chi-square with 17 degrees of freedom is below 41 in 99.9 % of draws.
    assert ((cells - count / 18) ** 2 / (count / 18)).sum() < 41
    assert set(plan.dy) == set(plan.dx) == {0, 1, 2}


def test_every_epoch_has_all_examples_in_a_new_order() -> None:
    data = loader()
    labels = [whole(data.epoch(number))[1] for number in range(2)]
    for y in labels:
        assert sorted(y.tolist()) == list(range(0, 150, 3))
    assert not torch.equal(*labels)
    assert torch.equal(whole(loader(shuffle=False).epoch(5))[1], torch.arange(50) * 3)
    assert not torch.equal(labels[0], whole(loader(seed=1).epoch(0))[1])


def test_batches_depend_on_seed_epoch_and_start_alone() -> None:
    data = loader(padding=2, flip=True)
    first = list(data.epoch(4))
    torch.manual_seed(9)
    next(data.epoch(1))
    other = loader(padding=2, flip=True)
    for start in (0, 3, len(data)):
        for again in (data, other):
            rest = list(again.epoch(4, start))
            assert len(rest) == len(data) - start
            for (x, y), (x2, y2) in zip(first[start:], rest, strict=True):
                assert torch.equal(x, x2)
                assert torch.equal(y, y2)
    before = torch.get_rng_state()
    list(data.epoch(0))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_together_see_what_one_process_sees(world: int) -> None:
    alone = list(loader(padding=2, flip=True).epoch(2, 1))
    ranks = [loader(padding=2, flip=True, rank=rank, world=world) for rank in range(world)]
    assert {len(data) for data in ranks} == {7}
    assert [sum(sizes) for sizes in zip(*(data.sizes() for data in ranks), strict=True)] == [8] * 6 + [2]
    together = zip(*(data.epoch(2, 1) for data in ranks), strict=True)
    for (x, y), parts in zip(alone, together, strict=True):
        assert torch.equal(x, torch.cat([part[0] for part in parts]))
        assert torch.equal(y, torch.cat([part[1] for part in parts]))


def test_the_last_batch_is_split_evenly() -> None:
    assert [loader(rank=rank, world=4).sizes()[-1] for rank in range(4)] == [1, 1, 0, 0]
    x, y = list(loader(rank=3, world=4).epoch(0))[-1]
    assert (x.shape, y.shape) == ((0, 3, 6, 5), (0,))


def test_rank_without_examples() -> None:
    [(x, _)] = loader(count=2, batch=4, rank=3, world=4).epoch(0)
    assert len(x) == 0


def test_images_repeat_if_there_are_more_examples() -> None:
    data = loader(count=4, examples=10, shuffle=False)
    assert (data.examples, whole(data.epoch(0))[1].tolist()) == (10, [0, 3, 6, 9, 0, 3, 6, 9, 0, 3])


def test_next_starts_at_the_given_batch_and_wraps_around() -> None:
    data = loader(count=6, batch=4, shuffle=False)
    data.begin(0, 1)
    assert [data.next(2)[1].tolist() for _ in range(2)] == [[12, 15], [0, 3]]


def test_starting_an_epoch_ends_the_previous_one() -> None:
    data = loader()
    first = data.epoch(0)
    next(first)
    next(data.epoch(1))
    with pytest.raises(WiringError, match="while epoch 0 was being read"):
        next(first)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 9, "world": 2}, "multiple of the number of ranks"),
        ({"batch": 0}, "batch = 0"),
        ({"rank": 2, "world": 2}, "rank = 2"),
        ({"examples": 0}, "at least one example"),
        ({"std": (0, 1, 1)}, "positive standard deviation"),
    ],
)
def test_rejects_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(WiringError, match=message):
        loader(**settings)


def test_rejects_bad_arguments() -> None:
    with pytest.raises(WiringError, match="expected uint8 images"):
        DeviceLoader(torch.zeros(2, 1, 2, 2), torch.zeros(2), batch=1, mean=[0], std=[1])
    with pytest.raises(WiringError, match="from 0 to 7, got epoch 0 and batch 8"):
        loader().epoch(0, 8)
    with pytest.raises(WiringError, match="epoch -1"):
        loader().epoch(-1)
    with pytest.raises(WiringError, match="at most 8 examples, got size = 9"):
        loader().next(9)


@pytest.mark.gpu
def test_gpu_matches_cpu() -> None:
    for (x, y), (x2, y2) in zip(
        loader(padding=2, flip=True).epoch(1), loader(padding=2, flip=True, device="cuda").epoch(1), strict=True
    ):
        assert torch.allclose(x, x2.cpu(), atol=1e-6)
        assert torch.equal(y, y2.cpu())


@pytest.mark.gpu
def test_captured_graph_sees_new_examples_at_every_replay() -> None:
    settings = {"count": 48, "padding": 2, "flip": True, "device": "cuda"}
    data = loader(**settings)
    data.begin(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(9):  # more than an epoch: warming up wraps around
            data.next(8)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x, y = data.next(8)
    for number, start in ((0, 0), (1, 0), (1, 4)):
        data.begin(number, start)
        expected = list(loader(**settings).epoch(number, start))
        for x2, y2 in expected:
            graph.replay()
            assert torch.equal(x, x2)
            assert torch.equal(y, y2)


@pytest.mark.gpu
def test_the_host_never_waits() -> None:
    data = loader(padding=2, flip=True, device="cuda")
    data.begin(0)
    with without_waiting():
        data.next(8)
