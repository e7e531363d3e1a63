"""The figures of docs/engine.md, and of inference in docs/costs.md, from the record of `benchmarks.latency`.

`benchmarks.readme` writes them.
"""

from __future__ import annotations

from typing import Any

from benchmarks.common import record
from wirings.train import recipes

ENGINE, PLAIN = "DNW x0.225, engine", "DNW x0.225, PyTorch, not compact"


def _found(part: str) -> dict[str, Any]:
    found: dict[str, Any] = record("benchmarks/latency-cpu")[part]
    return found


def latency() -> str:
    """Latency of one image of 224 pixels for every network and runtime."""
    found = _found("mobilenet")
    times = found["times"]
    lines = [f"| {found['hardware']}, {found['threads']} threads | median | quartiles | fastest |", "|---|---|---|---|"]
    for name, taken in times.items():
        low, middle, high, fastest = (f"{1e3 * taken[key]:.2f}" for key in ("q1_s", "median_s", "q3_s", "min_s"))
        lines.append(f"| {_shown(name)} | {middle} ms | {low} to {high} | {fastest} |")
    notes = f"({100 * found['live_share']:.0f} % of the nodes are alive. {_ratio(times)})"
    return "\n".join([*lines, "", notes, "", _distant_cores()])


def _distant_cores() -> str:
    """The same in a run in which the cores took longer to exchange what they computed."""
    found = _found("mobilenet_distant_cores")
    times, took = found["times"], 1e9 * sum(found["exchange_s"]) / 2
    sides = [ENGINE, f"{ENGINE}, int8", "MobileNetV1 x0.25, ONNX Runtime"]
    own = ", ".join(f"{1e3 * times[side]['median_s']:.2f} ms ({_shown(side)})" for side in sides)
    return f"In another run, in which a number took {took:.0f} ns from one core to the other and back: {own}."


def shipped() -> str:
    """The most important rows of `latency`, with the accuracies that the paper reports."""
    found = _found("mobilenet")
    times = found["times"]
    rows = {"DNW x0.225": "dnw-0.225", "MobileNetV1 x0.25": "mobilenetv1-0.25", "MobileNetV1 x0.5": "mobilenetv1-0.5"}
    sides = [ENGINE, "DNW x0.225, ONNX Runtime", PLAIN, *(f"MobileNetV1 x{w}, ONNX Runtime" for w in (0.25, 0.5))]
    lines = [
        f"| one image of 224 pixels, {found['threads']} CPU threads | time | ImageNet, in the paper |",
        "|---|---|---|",
    ]
    for name in sides:
        accuracy = (recipes.get(f"table3/{rows[name.partition(',')[0]]}").paper or {})["accuracy"]
        lines.append(f"| {_shown(name)} | {1e3 * times[name]['median_s']:.2f} ms | {accuracy} % |")
    work = f"The wiring is random, with the {found['mult_adds'] / 1e6:.1f}M multiply-adds of the paper's trained one."
    return "\n".join([*lines, "", f"(Medians, {found['hardware']}. {work} {_ratio(times)})"])


def _shown(name: str) -> str:
    network, how = name.split(", ", 1)
    return f"{network.replace('DNW', 'MobileNetV1-DNW').replace('x0', '×0')}, {how}"


def _ratio(times: dict[str, Any]) -> str:
    ratio = times[PLAIN]["median_s"] / times[ENGINE]["median_s"]
    return f"The engine is {ratio:.0f} times as fast as PyTorch on the original network."


def batches() -> str:
    found = _found("batches")
    return _by_batch([(f"{row['batch']}", row) for row in found["rows"]], f"images, {found['hardware']}")


def resnet() -> str:
    """Throughput by batch size, and the speed on large and small feature maps."""
    found = _found("resnet")
    titled = [(f"{100 * row['density']:g} %, {row['batch']}", row) for row in found["rows"]]
    sums = [step for step in found["steps"]["0.05"] if step["mult_adds"] > 1e6]
    first, last = (step["mult_adds"] / step["seconds"] / 1e9 for step in (sums[0], sums[-1]))
    note = (
        f"(One image at 5 %: the first layers, with maps of 32 × 32, run at {first:.0f} G multiply-adds per second, "
        f"the last, with maps of 4 × 4, at {last:.0f}.)"
    )
    return "\n".join([_by_batch(titled, f"weights, images, {found['hardware']}"), "", note])


def _by_batch(rows: list[tuple[str, dict[str, Any]]], head: str) -> str:
    names = list(rows[0][1]["times"])
    lines = [f"| {head} | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for title, row in rows:
        speeds = (row["batch"] / row["times"][name]["median_s"] for name in names)
        lines.append(f"| {title} | {' | '.join(f'{speed:,.0f}' for speed in speeds)} |")
    return "\n".join(lines)


def steps() -> str:
    """The time of every step for one image."""
    lines = ["| step | kind | way | multiply-adds | µs | G/s |", "|---|---|---|---|---|---|"]
    for step in _found("mobilenet")["steps"]:
        work, seconds = step["mult_adds"], step["seconds"]
        speed = f"{work / seconds / 1e9:.0f}" if work else ""
        lines.append(
            f"| `{step['name']}` | {step['kind']} | {step['way']} | {work:,} | {1e6 * seconds:.0f} | {speed} |"
        )
    return "\n".join(lines)


def density() -> str:
    """Sparse and dense kernels at different densities."""
    found = _found("density")
    rows = found["rows"]
    shares = sorted({row["density"] for row in rows})
    lines = [
        f"| µs, sparse / dense, {found['hardware']} | {' | '.join(f'{100 * share:g} %' for share in shares)} |",
        f"|---|{'---|' * len(shares)}",
    ]
    for layer in dict.fromkeys(row["layer"] for row in rows):
        own = {row["density"]: row for row in rows if row["layer"] == layer}
        cells = (f"{1e6 * own[share]['sparse_s']:.0f} / {1e6 * own[share]['dense_s']:.0f}" for share in shares)
        lines.append(f"| {layer} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tokens() -> str:
    """Latency of transformers, from the record of `benchmarks.latency_tokens`."""
    found = record("benchmarks/latency_tokens-cpu")
    about = found["encoder"]
    sides = {"engine": "engine", "engine, bfloat16": "bfloat16", "engine, int8": "int8"}
    sides |= {"ONNX": "ONNX Runtime", "ONNX Runtime, int8": "int8", "PyTorch": "PyTorch"}
    lines = [
        f"| {about['hardware']}, {about['threads']} threads, medians | {' | '.join(sides.values())} | |",
        "|---" * (len(sides) + 2) + "|",
    ]
    names = {"encoder": "encoder, 128 tokens", "decoder": "GPT, one token"}
    for part, name in names.items():
        for row in found[part]["rows"]:
            times = {side: 1e3 * taken["median_s"] for side, taken in row["times"].items()}
            times["ONNX"] = min(x for side, x in times.items() if side.startswith("ONNX") and "int8" not in side)
            best = min(times["ONNX"], times["PyTorch"]) / times["engine"]
            cells = [f"{times[side]:.2f} ms" if side in times else "" for side in sides]
            lines.append(f"| {name}, {100 * row['density']:g} % | {' | '.join(cells)} | {best:.1f} times as fast |")
    return "\n".join(lines)


FIGURES = {
    "latency": latency,
    "batches": batches,
    "resnet": resnet,
    "steps": steps,
    "tokens": tokens,
    "density": density,
}
