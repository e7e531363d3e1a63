"""Latency on a CPU: `wirings.engine`, ONNX Runtime and PyTorch, in one process with the same number of threads.

- ``mobilenet``: MobileNetV1-DNW ×0.225 on one image of 224 pixels: compiled by `wirings.engine`, exported to ONNX
  Runtime, and in PyTorch, compact or not; also MobileNetV1 ×0.25 and ×0.5, in ONNX Runtime and compiled.
- ``batches``: the same network on 1, 8 and 64 images.
- ``density``: single convolutions with 1 to 100 % of their weights, with sparse and with dense kernels.
- ``resnet``: ResNet18 for CIFAR-10, finalized at 5 and 2 % of its weights, on 1, 8 and 64 images. ONNX Runtime also
  multiplies by the zeros.

The wiring is random, not trained: see `draw_wiring`. Sides take turns. Some threads spin after a call (ONNX Runtime's
for 40 ms) and would occupy the next side's cores, so every turn starts with a pause, followed by calls that warm up
caches and cores and are not counted.

    python -m benchmarks.latency [mobilenet|batches|density|resnet] [--threads 2] [--seconds 4] [--out RECORD.json]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common import machine, save, summary
from wirings import compact, engine, finalize_, models
from wirings.compaction import CompactModel
from wirings.compaction.operations import Conv
from wirings.compaction.program import Program
from wirings.engine.edge_sums import SumsStep
from wirings.engine.tune import step_seconds
from wirings.models.mobilenet import STAGES, MobileNetV1DNW

WIDTH = 0.225
PAPER = 42.1e6
"""Multiply-adds of MobileNetV1-DNW ×0.225 in Table 3 of the paper."""
PIXELS = 224
PAUSE, WARM, BLOCK = 0.06, 0.1, 0.1
"""Seconds of a turn that are spent idle, on warm-up calls, and on measured calls."""
BATCHES = (1, 8, 64)
TURNS = 30
"""Maximum number of turns per requested second of calls."""
DISTANT = 2e-7
"""Seconds from one core to another and back above which the cores share no cache: such runs are recorded apart."""
DISTURBED = 0.02
"""Share of a turn that threads may spend waiting for a core before the turn counts as disturbed."""


# ---- networks -------------------------------------------------------------------------------------------------------


def draw_wiring(model: MobileNetV1DNW, share: float, seed: int = 0) -> int:
    """Give a network a random wiring in which ``share`` of the nodes are alive.

    Trained networks have many dead nodes, but edges drawn uniformly from all pairs leave hardly any. So the live nodes
    of every block are drawn first, then the real edges uniformly among them. All other edges get a negligible weight.

    Returns:
        The multiply-adds, as the paper counts them.
    """
    random = np.random.default_rng(seed)
    pixels, work, live = (PIXELS // 2) ** 2, 0, _drawn(random, STAGES[0].before, share)
    work += 27 * int(live.sum()) * pixels
    assert model.wiring is not None
    budgets = [report.edges for report in model.wiring.look()]
    for graph, stage, k in zip(model.stages, STAGES, budgets, strict=False):
        nodes = np.concatenate([live, *(_drawn(random, stage.channels, share) for _ in range(stage.blocks))])
        ends = [tile.edge_list() for tile in graph.tiles]  # type: ignore[union-attr]
        targets, sources = (np.concatenate(side) for side in zip(*ends, strict=True))
        real = random.choice(np.flatnonzero(nodes[targets] & nodes[sources]), k, replace=False)
        weights = np.full(len(targets), 1e-9)
        fan_in = np.bincount(targets[real], minlength=len(nodes)).clip(1)
        weights[real] = random.uniform(0.5, 1.5, k) * random.choice([-1, 1], k) / fan_in[targets[real]] ** 0.5
        with torch.no_grad():
            graph.all_weights().copy_(torch.from_numpy(weights))  # type: ignore[operator]
        sending = np.zeros(len(nodes), bool)
        sending[sources[real]] = True
        pixels //= stage.stride**2
        work += k * pixels + 9 * int(sending.sum()) * pixels
        live = nodes[-stage.channels :]
    return work + int(live.sum()) * model.head.out_features


def _drawn(random: np.random.Generator, count: int, share: float) -> np.ndarray:
    live = np.zeros(count, bool)
    live[random.permutation(count)[: round(count * share)]] = True
    return live


def dnw() -> tuple[MobileNetV1DNW, dict[str, Any]]:
    """The network with the paper's number of multiply-adds, and a description of its wiring."""
    torch.manual_seed(0)
    model = models.get("mobilenetv1_dnw", rule="dnw", width=WIDTH, classes=1000, image_size=PIXELS)
    assert isinstance(model, MobileNetV1DNW)
    low, high = 0.2, 1.0
    for _ in range(12):
        share = (low + high) / 2
        work = draw_wiring(model, share)
        low, high = (share, high) if work < PAPER else (low, share)
    assert abs(work / PAPER - 1) < 0.02, f"{work:,} multiply-adds"
    settle(model)
    about = {"wiring": "drawn", "seed": 0, "live_share": share, "mult_adds": int(work), "paper_mult_adds": PAPER}
    return model, about


def settle(model: nn.Module) -> None:
    """Run a few batches to fill the running statistics of norms, and switch to eval mode."""
    with torch.no_grad():
        for _ in range(6):
            model.train()(torch.randn(2, *model.input_shape))  # type: ignore[arg-type]
    model.eval()


def resnet(density: float) -> nn.Module:
    torch.manual_seed(0)
    model = models.get("resnet18", rule="dnw", density=density, classes=10, image_size=32)
    settle(model)
    return finalize_(model)


# ---- timing ---------------------------------------------------------------------------------------------------------


def onnx_runtime(small: CompactModel, threads: int) -> Callable[[Tensor], Any]:
    """Export the model and run it in ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        path = small.save(Path(folder) / "model.onnx")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def waited() -> float:
    """Seconds that threads of this process have waited for a core so far; 0 if unknown."""
    total = 0
    for place in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            total += int(place.read_text().split()[1])
    return total / 1e9


def in_turn(sides: dict[str, Callable[[], Any]], seconds: float) -> dict[str, dict[str, float]]:
    """Median, quartiles and minimum of the time per call of each side, with about ``seconds`` of calls per side.

    Sides take turns. Turns in which a thread had to wait for a core are excluded and counted as ``disturbed``. If the
    machine is never idle, all turns count in the end.
    """
    taken: dict[str, list[float]] = {name: [] for name in sides}
    left_out: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(int(TURNS * seconds)):
        unfinished = [name for name in sides if len(taken[name]) < max(5, seconds / BLOCK)]
        if not unfinished:
            break
        for name in unfinished:
            run = sides[name]
            time.sleep(PAUSE)
            start, warm = time.perf_counter(), 0
            while time.perf_counter() - start < WARM:
                run()
                warm += 1
            calls = max(1, int(warm * BLOCK / WARM))
            before, start = waited(), time.perf_counter()
            for _ in range(calls):
                run()
            block = time.perf_counter() - start
            quiet = waited() - before < DISTURBED * block
            (taken if quiet else left_out)[name].append(block / calls)
    results, quiet_enough = (
        {},
        all(len(times) >= 5 for times in taken.values()),
    )  # decided once for all sides, to keep them comparable
    for name in sides:
        counted = taken[name] if quiet_enough else taken[name] + left_out[name]
        results[name] = {**summary(counted), "min_s": min(counted), "disturbed": len(left_out[name])}
    return results


@torch.no_grad()
def measure(
    networks: dict[str, Callable[[Tensor], Any]], x: Tensor, seconds: float, same: Iterable[str] = ()
) -> dict[str, dict[str, float]]:
    """Measure networks on images, and check that those in ``same`` give the same outputs."""
    outputs = [networks[name](x) for name in same]
    for output in outputs[1:]:
        scale = outputs[0].abs().max()
        assert (output - outputs[0]).abs().max() < 1e-4 * scale, f"outputs differ: {list(same)}"
    sides: dict[str, Callable[[], Any]] = {name: functools.partial(run, x) for name, run in networks.items()}
    times = in_turn(sides, seconds)
    for name, taken in times.items():
        print(
            f"  {name:44} median {1e3 * taken['median_s']:8.3f} ms, quartiles {1e3 * taken['q1_s']:.3f} to "
            f"{1e3 * taken['q3_s']:.3f}, fastest {1e3 * taken['min_s']:.3f}, n = {taken['n']}, "
            f"disturbed {taken['disturbed']}"
        )
    return times


def exchange_seconds() -> float | None:
    """How long a number takes from one core to another and back; None if that cannot be measured.

    It depends on which cores a virtual machine has at the time: it takes several times as long if they share no cache,
    and then everything that is computed by two threads is slower, too.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "exchange"
        try:
            source = str(Path(__file__).parent / "exchange.cpp")
            subprocess.run(["g++", "-O2", "-pthread", source, "-o", str(program)], check=True)
            found = subprocess.run([str(program)], check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            return None
    return 1e-9 * float(found.stdout)


# ---- parts ----------------------------------------------------------------------------------------------------------


def mobilenet(threads: int, seconds: float) -> dict[str, Any]:
    model, about = dnw()
    print(
        f"MobileNetV1-DNW ×{WIDTH}, random wiring (seed {about['seed']}, {100 * about['live_share']:.1f} % of nodes "
        f"alive): {about['mult_adds'] / 1e6:.2f}M multiply-adds as the paper counts them; paper: {PAPER / 1e6:.1f}M"
    )
    x = torch.randn(1, 3, PIXELS, PIXELS)
    small = compact(model, x)
    print(small.report)
    fast = engine.compile(small, threads=threads)
    int8 = engine.compile(small, threads=threads, dtype="int8", calibrate=[torch.randn(4, 3, PIXELS, PIXELS)])
    plain = finalize_(copy.deepcopy(model)).eval()
    networks: dict[str, Callable[[Tensor], Any]] = {
        "DNW x0.225, engine": fast,
        "DNW x0.225, ONNX Runtime": onnx_runtime(small, threads),
        "DNW x0.225, PyTorch, not compact": plain,
        "DNW x0.225, PyTorch, compact": small,
    }
    same = list(networks)
    networks["DNW x0.225, engine, int8"] = int8
    for width in (0.25, 0.5):
        torch.manual_seed(0)
        dense = models.get("mobilenetv1", width=width, classes=1000, image_size=PIXELS)
        settle(dense)
        smaller = compact(dense, x)
        networks[f"MobileNetV1 x{width}, ONNX Runtime"] = onnx_runtime(smaller, threads)
        networks[f"MobileNetV1 x{width}, engine"] = engine.compile(smaller, threads=threads)
    exchange = [exchange_seconds()]
    times = measure(networks, x, seconds, same)
    exchange.append(exchange_seconds())
    report = fast.report
    print(report)
    with torch.no_grad():
        lost = float((int8(x) - small(x)).norm() / small(x).norm())
    print(f"from core to core and back, before and after: {exchange} s")
    print(f"int8 changes the outputs by {100 * lost:.2f} %")
    mine = times["DNW x0.225, engine"]["median_s"]
    ratio = times["DNW x0.225, PyTorch, not compact"]["median_s"] / mine
    print(f"engine: {1e3 * mine:.2f} ms; {ratio:.1f}× faster than PyTorch on the original network")
    return {
        **about,
        "compact": small.report.as_mapping() if small.report else None,
        "times": times,
        "exchange_s": exchange,
        "int8_loss": lost,
        "steps": report.as_mapping()["steps"],
        "memory_bytes": fast.bytes,
    }


def batches(threads: int, seconds: float) -> dict[str, Any]:
    model, about = dnw()
    x = torch.randn(max(BATCHES), 3, PIXELS, PIXELS)
    small = compact(model, x[:1])
    networks = {"engine": engine.compile(small, threads=threads), "ONNX Runtime": onnx_runtime(small, threads)}
    rows = []
    for batch in BATCHES:
        print(f"MobileNetV1-DNW ×{WIDTH}, {batch} images")
        rows.append({"batch": batch, "times": measure(networks, x[:batch], seconds, list(networks))})
    return {**about, "rows": rows}


LAYERS = {"1 × 1, 256 channels, 28 × 28": (256, 1, 28), "1 × 1, 512 channels, 14 × 14": (512, 1, 14),
          "3 × 3, 64 channels, 32 × 32": (64, 3, 32), "3 × 3, 256 channels, 8 × 8": (256, 3, 8)}  # fmt: skip
DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)


def density(threads: int, seconds: float) -> dict[str, Any]:
    """Find the density from which dense kernels are faster than sparse ones."""
    rows = []
    for layer, (channels, kernel, pixels) in LAYERS.items():
        print(layer)
        for share in DENSITIES:
            torch.manual_seed(0)
            weight = torch.randn(channels, channels, kernel, kernel)
            weight *= torch.rand_like(weight) < share
            conv = Conv("y", ("x",), weight, torch.zeros(channels), (1, 1), (kernel // 2, kernel // 2))
            program = Program({"x": (channels, pixels, pixels)}, [conv], ("y",))
            made = {way: engine.compile(program, engine=way, threads=threads) for way in ("sparse", "dense")}
            x = torch.randn(1, channels, pixels, pixels)
            looks: dict[str, list[float]] = {way: [] for way in made}
            for _ in range(int(20 * seconds)):
                for way, net in made.items():
                    plan = net._segments[0].plan
                    assert plan is not None
                    times = step_seconds(plan, [x])
                    kinds = [isinstance(step, SumsStep) for step in plan.steps]
                    looks[way].append(float(times[kinds].sum()))  # without the copies of inputs and outputs
            median = {way: float(np.median(found)) for way, found in looks.items()}
            rows.append({"layer": layer, "density": share, **{f"{way}_s": value for way, value in median.items()}})
            print(
                f"  {100 * share:5g} %: sparse {1e6 * median['sparse']:8.1f} µs, dense {1e6 * median['dense']:8.1f} µs"
            )
    return {"rows": rows}


def resnets(threads: int, seconds: float) -> dict[str, Any]:
    rows, steps = [], {}
    for density in (0.05, 0.02):
        model = resnet(density)
        x = torch.randn(max(BATCHES), 3, 32, 32)
        small = compact(model, x[:1])
        networks = {
            "engine": engine.compile(small, threads=threads),
            "ONNX Runtime": onnx_runtime(small, threads),
            "PyTorch, not compact": model,
        }
        print(f"ResNet18 for CIFAR-10, {100 * density:g} % of the weights")
        print(small.report)
        for batch in BATCHES:
            print(f"{batch} images")
            times = measure(networks, x[:batch], seconds, list(networks))
            rows.append({"density": density, "batch": batch, "times": times})
        fast = networks["engine"]
        assert isinstance(fast, engine.EngineModel)
        print(fast.report)
        steps[f"{density:g}"] = fast.report.as_mapping()["steps"]
    return {"rows": rows, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", choices=["mobilenet", "batches", "density", "resnet"], default=[])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of calls per side")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    import onnxruntime

    torch.set_num_threads(given.threads)
    parts = {"mobilenet": mobilenet, "batches": batches, "density": density, "resnet": resnets}
    record: dict[str, Any] = {"benchmark": "latency"}
    if given.out is not None and given.out.exists():
        record = json.loads(given.out.read_text())
    for name in given.part or parts:
        about = machine("cpu")
        about["versions"]["onnxruntime"] = onnxruntime.__version__
        print(f"{about['hardware']}, {given.threads} threads, {about['versions']}")
        found = parts[name](given.threads, given.seconds)
        distant = name == "mobilenet" and all(each is not None and each > DISTANT for each in found["exchange_s"])
        record["mobilenet_distant_cores" if distant else name] = {**about, **found}
    save(given.out, record)


if __name__ == "__main__":
    main()
