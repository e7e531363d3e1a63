"""Images of every size: compiled networks return what PyTorch does or raise; they never crash the process."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.engine.random_programs import RandomProgram
from tests.engine.test_kernels import differences, nodes
from wirings import WiringError, engine
from wirings.compaction.operations import Conv
from wirings.compaction.program import Program
from wirings.engine import bounds
from wirings.engine.engine_model import EngineModel
from wirings.engine.execution_plan import ExecutionPlan
from wirings.engine.memory_layout import MapMemory
from wirings.engine.memory_needs import bytes_per_image
from wirings.engine.pack_weights import grouped
from wirings.engine.quantization import Quantization
from wirings.engine.step import LoweredStep, StepContext

needs_kernels = pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")


def large_convolution(made: RandomProgram) -> None:
    made.add(Conv("y", ("x",), made.normal(4, 3, 3, 3), made.normal(4), (1, 1), (1, 1)))


def large_nodes(made: RandomProgram) -> None:
    first = made.add(Conv("a", ("x",), made.normal(4, 3, 3, 3), made.normal(4), (1, 1), (1, 1)))
    second = made.add(Conv("b", (first,), made.normal(4, 1, 3, 3), None, (1, 1), (1, 1), (1, 1), 4))
    made.add(Conv("c", (second,), made.normal(2, 4, 1, 1)))


@needs_kernels
@pytest.mark.parametrize("way", ["sparse", "dense"])
@pytest.mark.parametrize(("make", "size"), [(large_convolution, (1150, 1150)), (large_nodes, (1080, 1920))])
def test_large_images(make: Callable[[RandomProgram], None], size: tuple[int, int], way: str) -> None:
    """These used to crash the process: numbers of pixels overflowed 32 bits."""
    made = RandomProgram(0, (3, *size))
    make(made)
    program = Program(made.inputs, made.operations, (made.operations[-1].output,))
    images = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))
    assert max(differences(program, images, engine=way, threads=1)) < 1e-5


@needs_kernels
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.tuples(st.integers(1, 40), st.integers(1, 400)),
    tall=st.booleans(),
    kernel=st.tuples(st.integers(1, 23), st.integers(1, 45)),
    stride=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    extra=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    taps=st.sampled_from([0.02, 0.3, 1.0]),
    depthwise=st.booleans(),
    way=st.sampled_from(["sparse", "dense"]),
    threads=st.integers(1, 8),
)
def test_kernels_of_any_size(
    seed: int,
    size: tuple[int, int],
    tall: bool,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    extra: tuple[int, int],
    taps: float,
    depthwise: bool,
    way: str,
    threads: int,
) -> None:
    """Kernels that may extend further than a cache line, on one side only, on maps of any height and width."""
    generator = torch.Generator().manual_seed(seed)
    size = size[::-1] if tall else size
    padding = tuple(
        max(p, -(-(d * (k - 1) + 1 - s) // 2)) for p, d, k, s in zip(extra, dilation, kernel, size, strict=True)
    )
    weight = torch.randn(3, 2, *kernel, generator=generator)
    weight *= torch.rand(weight.shape, generator=generator) < taps
    operations = [Conv("a", ("x",), weight, torch.randn(3, generator=generator), stride, padding, dilation)]
    if depthwise:
        node = torch.randn(3, 1, 3, 3, generator=generator)
        operations.append(Conv("b", ("a",), node, None, (1, 1), (1, 1), (1, 1), 3))
    program = Program({"x": (2, *size)}, operations, (operations[-1].output,))
    images = torch.randn(2, 2, *size, generator=generator)
    assert max(differences(program, images, engine=way, threads=threads)) < 1e-5


@needs_kernels
@pytest.mark.parametrize("way", ["sparse", "dense"])
@pytest.mark.parametrize("stride", [(1, 1), (3, 2)])
@pytest.mark.parametrize("far", [(29, 31), (30, 5), (40_000, 2**33)])
def test_weights_that_meet_no_pixel(far: tuple[int, int], stride: tuple[int, int], way: str) -> None:
    """Kernels that reach further than the maps need no more zeros around these than the maps have pixels."""
    weight = torch.randn(4, 3, 3, 3)
    program = Program({"x": (3, 30, 32)}, [Conv("y", ("x",), weight, torch.randn(4), stride, far, far)], ("y",))
    made = engine.compile(program, engine=way, threads=2)
    images = torch.randn(2, 3, 30, 32)
    torch.testing.assert_close(made(images), program.run(images)[0], rtol=1e-4, atol=1e-4)
    (plan,) = [segment.plan for segment in made._segments]
    assert plan is not None
    assert plan.bytes < 2**20
    quantization = Quantization(frozenset({"y"}), {"x": (np.full(3, -4.0, np.float32), np.full(3, 4.0, np.float32))})
    rounded = EngineModel(program, way, 2, quantization=quantization)
    assert float((rounded(images) - program.run(images)[0]).abs().max()) < 0.3
    (plan,) = [segment.plan for segment in rounded._segments]
    assert plan is not None
    assert plan.bytes < 2**20


@needs_kernels
@pytest.mark.parametrize("size", [(1, 1), (1, 8192), (8192, 1), (3, 8191), (8191, 3)])
@pytest.mark.parametrize("how", [("auto", 1), ("sparse", 8), ("dense", 3)])
def test_narrow_images(size: tuple[int, int], how: tuple[str, int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, 2, 1), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1, groups=3), nn.Conv2d(3, 4, 5, padding=2),
        nn.MaxPool2d(3, 2, 1), nn.AdaptiveAvgPool2d((1, 3)), nn.Flatten(), nn.Linear(12, 2),
    ).eval()  # fmt: skip
    images = torch.randn(2, 1, *size)
    made = engine.compile(model, images[:1], engine=how[0], threads=how[1])
    torch.testing.assert_close(made(images), model(images).detach(), rtol=1e-4, atol=1e-5)


@needs_kernels
def test_zeros_beside_the_last_row_of_a_map() -> None:
    """Only the rightmost of 41 taps is not zero, with fewer than 20 floats up to the next cache line."""
    weight = torch.zeros(3, 2, 1, 41)
    weight[..., 40] = torch.randn(3, 2, 1)
    program = Program({"x": (2, 5, 16)}, [Conv("y", ("x",), weight, None, (1, 1), (0, 20))], ("y",))
    for way in ("sparse", "dense"):
        assert max(differences(program, torch.randn(2, 2, 5, 16), engine=way, threads=2)) < 1e-6


@needs_kernels
def test_zeros_beside_phases_of_an_input() -> None:
    """A wide kernel does not read what earlier steps left in scratch memory as its padding."""
    weight, node = torch.randn(4, 3, 1, 81), torch.randn(4, 1, 3, 3)
    operations = [
        Conv("a", ("x",), weight, None, (2, 2), (0, 40)),
        Conv("b", ("a",), node, None, (1, 1), (1, 1), (1, 1), 4),
    ]
    program = Program({"x": (3, 64, 200)}, operations, ("b",))
    made = engine.compile(program, engine="sparse", threads=1)
    (segment,) = made._segments
    assert segment.plan is not None
    for arena in segment.plan._scratch:
        arena.values[:] = np.nan
    images = torch.randn(1, 3, 64, 200)
    torch.testing.assert_close(made(images), program.run(images)[0], rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize(
    "layer",
    [nn.AdaptiveAvgPool2d(1), nn.AvgPool2d((4200, 4200)), nn.Sequential(nn.Conv2d(1, 1, 1), nn.AdaptiveAvgPool2d(1))],
    ids=["mean", "pool", "sums"],
)
def test_means_of_many_pixels(layer: nn.Module) -> None:
    """More than 2^24 ones, where a plain sum in float32 would stop growing."""
    images = torch.ones(1, 1, 4200, 4200)
    for x in layer.parameters():
        nn.init.ones_(x)
    made = engine.compile(layer.eval(), images, engine="sparse", threads=1)
    assert abs(float(made(images)) / (2 if list(layer.parameters()) else 1) - 1) < 1e-5


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
def test_more_images_than_are_scheduled_at_a_time(threads: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).eval()
    images = torch.randn(2 * 1024 + 3, 3)
    made = engine.compile(model, images[:1], engine="sparse", threads=threads)
    torch.testing.assert_close(made(images), model(images).detach())


@pytest.mark.parametrize("number", [bounds.MAX_INT32 + 1, 2**32, -(2**31), 2**40])
def test_refuses_numbers_of_more_than_32_bits(number: int) -> None:
    words = rf"layer is too large .* up to 2,147,483,647, got {number:,}\. .*smaller images.*engine=\"torch\""
    with pytest.raises(WiringError, match=words):
        bounds.expect_int32("layer", 5, number)
    with pytest.raises(WiringError, match=words):
        bounds.as_int32(np.array([5, number]), "layer")


def test_keeps_the_largest_32_bit_numbers() -> None:
    kept = bounds.as_int32(np.array([bounds.MAX_INT32, 0, -1]), "layer")
    assert kept.dtype == np.int32
    assert kept.tolist() == [bounds.MAX_INT32, 0, -1]
    for block in (1, 8):  # records with the largest offset
        place = np.array([bounds.MAX_INT32, bounds.MAX_INT32 - 3], np.int32)
        _, records = grouped(np.array([0, 1]), place, np.ones(2, np.float32), block, 2)
        assert sorted(set(records[:, 0].tolist())) == [bounds.MAX_INT32 - 3, bounds.MAX_INT32]


@needs_kernels
@pytest.mark.parametrize("way", ["sparse", "dense"])
@pytest.mark.parametrize("moved", [2**31, 2**32])
def test_refuses_memory_of_more_than_32_bits(way: str, moved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all maps were further up in memory; without the check, 2^32 floats further up is the same place."""
    plan = MapMemory.plan

    def far(self: MapMemory) -> int:
        floats = plan(self) + moved
        for buffer in self.buffers:
            buffer.base += moved
        return floats

    monkeypatch.setattr(MapMemory, "plan", far)
    program = nodes(0, (20, 20), [6, 4], 1, 0.5)
    made = engine.compile(program, engine=way, threads=1)  # PyTorch runs what is too large
    assert [segment.plan for segment in made._segments] == [None]
    monkeypatch.setattr("wirings.engine.execution_plan.MAX_FLOATS", 2**40)
    with pytest.raises(WiringError, match=r"too large for the compiled kernels: expected .* up to 2,147,483,647, got"):
        engine.compile(program, engine=way, threads=1)


@needs_kernels
def test_networks_that_do_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    program = nodes(0, (20, 20), [60, 40], 1, 0.5)
    images = torch.randn(5, 3, 20, 20)
    (segment,) = engine.compile(program, engine="sparse", threads=4)._segments
    plan = segment.plan
    assert plan is not None
    assert segment.batch_plan is not None
    scratch = sum(4 * len(arena.values) for arena in plan._scratch)
    for installed, native in ((plan.bytes + scratch, True), (plan.bytes - 1, False)):
        monkeypatch.setattr("wirings.engine.execution_plan.installed_memory", lambda installed=installed: installed)
        made = engine.compile(program, engine="sparse", threads=4)
        assert [(p.plan is not None, p.batch_plan is not None) for p in made._segments] == [(native, False)]
        torch.testing.assert_close(made(images), program.run(images)[0], rtol=1e-5, atol=1e-5)
    monkeypatch.setattr("wirings.engine.execution_plan.installed_memory", lambda: plan.bytes)
    with pytest.raises(WiringError, match=r"bytes of memory on 4 threads, but this machine has .* Use fewer threads"):
        engine.compile(program, engine="sparse", threads=4)


def say_available(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    for module in ("memory_needs", "execution_plan", "verification"):
        monkeypatch.setattr(f"wirings.engine.{module}.available_memory", lambda: left)


@needs_kernels
def test_many_images_that_do_not_fit_are_run_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks are compared on as many images as fit into memory."""
    program = nodes(0, (20, 20), [60, 40], 1, 0.5)
    images = torch.randn(5, 3, 20, 20)
    full = engine.compile(program, engine="sparse", threads=4)
    each = bytes_per_image(program, program.shapes())
    (segment,) = full._segments
    assert segment.plan is not None
    scratch = sum(4 * len(arena.values) for arena in segment.plan._scratch)
    for more, batches, several in (
        (full.bytes + 5 * each, True, 5),
        (segment.plan.bytes + scratch + 2 * each, False, 2),
        (segment.plan.bytes + scratch + each, False, 1),
    ):
        counts: list[int] = []
        run = Program.run

        def counted(self: Program, *inputs: Tensor, counts: list[int] = counts, run: Any = run) -> Any:
            counts.append(len(inputs[0]))
            return run(self, *inputs)

        with monkeypatch.context() as patch:
            say_available(patch, more)
            patch.setattr(Program, "run", counted)
            made = engine.compile(program, engine="sparse", threads=4)
        assert [(p.plan is not None, p.batch_plan is not None) for p in made._segments] == [(True, batches)]
        assert counts == [several]
        torch.testing.assert_close(made(images), program.run(images)[0], rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 4])
def test_images_that_do_not_fit_are_refused_or_run_on_pytorch(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = nodes(0, (20, 20), [60, 40], 1, 0.5)
    images = torch.randn(5, 3, 20, 20)
    (segment,) = engine.compile(program, engine="sparse", threads=threads)._segments
    assert segment.plan is not None
    scratch = sum(4 * len(arena.values) for arena in segment.plan._scratch)
    say_available(monkeypatch, segment.plan.bytes + scratch + bytes_per_image(program, program.shapes()) // 2)
    for way in ("sparse", "dense"):
        with pytest.raises(WiringError, match=r"images of this size need .* bytes .* available: .* Use fewer threads"):
            engine.compile(program, engine=way, threads=threads)
    made = engine.compile(program, engine="auto", threads=threads)
    assert made.uses_torch
    torch.testing.assert_close(made(images), program.run(images)[0])


@needs_kernels
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: not enough memory: you tried to"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        MemoryError("not enough memory to run 3 images"),
    ],
)
def test_failed_allocations_are_refused_or_run_on_pytorch(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    program = nodes(0, (20, 20), [6, 4], 1, 0.5)

    def fails(*_: Any) -> None:
        raise error

    for name in ("run", "choose"):
        with monkeypatch.context() as patch:
            patch.setattr(ExecutionPlan, name, fails)
            with pytest.raises(WiringError, match=r"not enough memory to compile .* Use fewer threads, smaller images"):
                engine.compile(program, engine="sparse", threads=2)
            made = engine.compile(program, engine="auto", threads=2)
        assert made.uses_torch
        images = torch.randn(3, 3, 20, 20)
        torch.testing.assert_close(made(images), program.run(images)[0])


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="it limits memory as Linux does")
@pytest.mark.slow
@pytest.mark.parametrize("way", ["auto", "sparse"])
def test_large_results_with_little_memory(way: str) -> None:
    """Four images of 256 MiB each and their copies would take more than the process may."""
    code = f"""
import resource, torch
from torch import nn
from wirings import WiringError, engine
from tests.fuzz.runner import limit_memory
engine.available()
limit_memory(3 * 2**29)
model = nn.Upsample(scale_factor=2048)
image = torch.randn(1, 1, 4, 4)
try:
    made = engine.compile(model, image, engine="{way}", threads=7)
except WiringError as error:
    assert "memory" in str(error), error
else:
    assert torch.equal(made(image), model(image))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_kernels
@pytest.mark.parametrize("way", ["sparse", "dense"])
@pytest.mark.parametrize("threads", [1, 3])
def test_steps_stay_inside_their_memory(way: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the memory were smaller than its maps: the step that uses the last of them raises before it runs."""
    program = nodes(0, (60, 60), [6, 4], 1, 0.5)
    pack = LoweredStep.pack
    found: list[str] = []

    def short(self: LoweredStep, context: StepContext) -> Any:
        packed = pack(self, context)
        with pytest.raises(WiringError, match=rf"{self.name}: .*would access floats .* of .*a bug in wirings"):
            pack(self, dataclasses.replace(context, floats=100))
        found.append(self.name)
        return packed

    monkeypatch.setattr(LoweredStep, "pack", short)
    images: Tensor = torch.randn(2, 3, 60, 60)
    made = engine.compile(program, engine=way, threads=threads)
    torch.testing.assert_close(made(images), program.run(images)[0], rtol=1e-5, atol=1e-5)
    assert {"relu0", "head"} & set(found)
    assert len(found) >= len(made._segments[0].plan.steps)  # type: ignore[union-attr]
