"""Networks that were written elsewhere: whether they profile, compact, export and compile, and how fast they are.

Every network of `benchmarks.zoo` gets random weights, of which a random wiring keeps 10 %. PyTorch and the engine then
take turns on one example. What a step cannot do is recorded in the words of its error. The record is written after
every network, so that ``--resume`` goes on after an interruption.

    python -m benchmarks.networks [--only WORD …] [--threads 2] [--seconds 2] [--engine auto] [--resume] [--out RECORD]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.common import RESULTS, machine, record, save
from benchmarks.latency import in_turn
from benchmarks.zoo import NETWORKS
from wirings import WiringError, compact, engine, finalize_, profile, wire_
from wirings.compaction import CompactModel
from wirings.engine import EngineModel
from wirings.utils.example_input import CallArguments, example_arguments

DENSITY = 0.1
BRANCH_SCALE = 0.3
CALIBRATION = 8
FILES = ("onnx", "pt2", "safetensors")


def wired(make: Callable[[], tuple[nn.Module, Any]]) -> tuple[nn.Module, Any]:
    """A network of which 10 % of the weights are left, and an example."""
    torch.manual_seed(0)
    model, example = make()
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() and not weight.any():  # biases, and matrices that nothing would pass; training changes them
                weight.normal_(std=0.02)
        for module in norms:
            if module.weight.abs().max() < 0.2:  # the last norms of branches, which stay small in trained networks
                module.weight.fill_(BRANCH_SCALE)
    wire_(model, "random", density=DENSITY, scale_weights=True)
    finalize_(model.eval())
    if norms:  # statistics of random weights, from enough images that the network stays well-conditioned
        for module in norms:
            module.reset_running_stats()
            module.train().momentum = None
        with torch.no_grad():
            model(torch.randn(CALIBRATION, *example.shape[1:]))
    return model.eval(), example


def positional(arguments: CallArguments) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The tensors of a call, without what is the same in every call."""
    named = {name: x for name, x in arguments.kwargs.items() if isinstance(x, Tensor)}
    return [x for x in arguments.args if isinstance(x, Tensor)], named


def attempt(run: Callable[[], Any]) -> tuple[Any, str | None]:
    """What a step returns, or the error that it ends in."""
    try:
        return run(), None
    except WiringError as error:
        return None, str(error)


def examine(title: str, threads: int, seconds: float, way: str = "auto") -> dict[str, Any]:
    """One network's row of the record."""
    model, example = wired(NETWORKS[title])
    row: dict[str, Any] = {"network": title}
    counted, row["profile_error"] = attempt(lambda: profile(model, example))
    if counted is not None:
        row["profile"] = {"params": counted.params, "mult_adds": counted.mult_adds, "notes": list(counted.notes)}
    start = time.perf_counter()
    small, row["compact_error"] = attempt(lambda: compact(model, example))
    if small is None:
        return row
    row |= {"compact_s": time.perf_counter() - start, "compact": small.report.as_mapping()}
    with tempfile.TemporaryDirectory() as folder:
        for kind in FILES:
            path, row[f"{kind}_error"] = attempt(lambda kind=kind: small.save(Path(folder) / f"model.{kind}"))  # type: ignore[misc]
            row[f"{kind}_bytes"] = path.stat().st_size if path is not None else None
    fast, row["engine_error"] = attempt(lambda: engine.compile(small, engine=way, threads=threads))
    if fast is None:
        return row
    return row | timed(model, small, fast, example_arguments(model, example, "profile"), seconds)


@torch.no_grad()
def timed(
    model: nn.Module, small: CompactModel, fast: EngineModel, arguments: CallArguments, seconds: float
) -> dict[str, Any]:
    """The times of PyTorch and the engine in turn, and what the engine leaves to PyTorch."""
    args, kwargs = positional(arguments)
    torch_steps = Counter(
        getattr(o, "target", type(o).__name__) for s in fast._segments if s.plan is None for o in s.operations
    )
    sides: dict[str, Callable[[], Any]] = {
        "PyTorch": lambda: model(*arguments.args, **arguments.kwargs),
        "engine": lambda: fast(*args, **kwargs),
    }
    row: dict[str, Any] = {"on_torch": dict(torch_steps.most_common()), "uses_torch": fast.uses_torch}
    if seconds > 0:
        row["times"] = in_turn(sides, seconds)
        row["ratio"] = row["times"]["PyTorch"]["median_s"] / row["times"]["engine"]["median_s"]
    return row


def describe(row: dict[str, Any]) -> str:
    """A row in one line."""
    parts = [f"{row['network']:48}"]
    if (report := row.get("compact")) is not None:
        shares = [report["after"][key] / max(report["before"][key], 1) for key in ("parameters", "mult_adds")]
        parts.append(f"{100 * shares[0]:.0f} % parameters, {100 * shares[1]:.0f} % multiply-adds")
    if "ratio" in row:
        parts.append(f"{1e3 * row['times']['engine']['median_s']:.2f} ms, {row['ratio']:.2f} × PyTorch's speed")
    if row.get("uses_torch"):
        parts.append("on PyTorch")
    elif row.get("on_torch"):
        parts.append(f"on PyTorch: {sum(row['on_torch'].values())} operators")
    parts += [f"{key.removesuffix('_error')}: {row[key]}" for key in row if key.endswith("_error") and row[key]]
    return "; ".join(parts)


def networks() -> str:
    """The table in docs/engine.md."""
    lines = [
        "| network | parameters | multiply-adds | bytes | ONNX | pt2 | safetensors | PyTorch | engine | | on PyTorch |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    reasons: list[str] = []
    if (RESULTS / "benchmarks" / "networks.json").exists():
        lines += [_line(row, reasons) for row in record("benchmarks/networks")["rows"]]
    return "\n".join([*lines, *(["", *(f"{n}. {reason}" for n, reason in enumerate(reasons, 1))] if reasons else [])])


def _line(row: dict[str, Any], reasons: list[str]) -> str:
    """A row of the table. Errors are numbered, and added to ``reasons``."""

    def cell(key: str, value: str) -> str:
        if not row.get(f"{key}_error"):
            return value if f"{key}_error" in row else ""
        reason = row[f"{key}_error"].replace("|", "/")
        if reason not in reasons:
            reasons.append(reason)
        return f"no ({reasons.index(reason) + 1})"

    if row.get("compact_error"):
        return f"| {row['network']} | {cell('compact', '')} | | | | | | | | | |"
    sizes = row["compact"]
    keys = ("parameters", "mult_adds", "bytes")
    shares = [f"{100 * sizes['after'][key] / max(sizes['before'][key], 1):.0f} %" for key in keys]
    shares[1] += " (not all)" if sizes["uncounted"] else ""
    files = [cell(kind, "yes") for kind in FILES]
    if row.get("engine_error"):
        return f"| {row['network']} | {' | '.join([*shares, *files])} | | {cell('engine', '')} | | |"
    times = ["", "", ""]
    if "times" in row:
        times = [f"{1e3 * row['times'][side]['median_s']:.1f} ms" for side in ("PyTorch", "engine")]
        times.append(f"{row['ratio']:.1f} ×")
    left = "all" if row.get("uses_torch") else str(sum(row["on_torch"].values()) or "none")
    cells = [*shares, *files, *times, left]
    return f"| {row['network']} | {' | '.join(cells)} |"


FIGURES = {"networks": networks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words in the titles of networks")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of calls per side; 0 measures nothing")
    parser.add_argument("--engine", default="auto", help="as for wirings.engine.compile")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", action="store_true", help="keep the rows that the record already has")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows: dict[str, dict[str, Any]] = {}
    if given.resume and given.out is not None and given.out.exists():
        rows = {row["network"]: row for row in json.loads(given.out.read_text())["rows"]}
    settings = {"threads": given.threads, "density": DENSITY, "seconds": given.seconds, "engine": given.engine}
    about = {"benchmark": "networks", **machine("cpu"), "settings": settings}
    for title in NETWORKS:
        if title in rows or (given.only and not any(word.lower() in title.lower() for word in given.only)):
            continue
        rows[title] = examine(title, given.threads, given.seconds, given.engine)
        print(describe(rows[title]), flush=True)
        save(given.out, {**about, "rows": [rows[name] for name in NETWORKS if name in rows]})


if __name__ == "__main__":
    main()
