"""Networks that were written elsewhere: whether they profile, compact, export and compile, and how fast they are.

Every network of `benchmarks.zoo` gets random weights, of which a random wiring keeps 10 %. PyTorch and the engine then
take turns on one example. What a step cannot do is recorded in the words of its error.

    python -m benchmarks.networks [--only WORD …] [--threads 2] [--seconds 2] [--engine auto] [--out RECORD.json]
"""

from __future__ import annotations

import argparse
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


def wired(make: Callable[[], tuple[nn.Module, Any]]) -> tuple[nn.Module, Any]:
    """A network of which 10 % of the weights are left, and an example."""
    torch.manual_seed(0)
    model, example = make()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1 and not weight.any():  # some start with zeros, which nothing passes
                weight.normal_(std=0.02)
        for module in model.modules():
            if isinstance(module, _BatchNorm) and not module.weight.any():
                module.weight.fill_(1.0)
    wire_(model, "random", density=DENSITY, scale_weights=True)
    finalize_(model)
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    with torch.no_grad():
        for module in norms:
            module.train().momentum = None
        for _ in range(3 if norms else 0):  # statistics of random weights
            model.eval()
            for module in norms:
                module.train()
            model(torch.randn(2, *example.shape[1:]))
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
        for kind in ("safetensors", "onnx"):
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
    row: dict[str, Any] = {"on_torch": dict(torch_steps.most_common())}
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
    if row.get("on_torch"):
        parts.append(f"on PyTorch: {sum(row['on_torch'].values())} operators")
    parts += [f"{key.removesuffix('_error')}: {row[key]}" for key in row if key.endswith("_error") and row[key]]
    return "; ".join(parts)


def networks() -> str:
    """The table in docs/engine.md."""
    lines = [
        "| network | parameters | multiply-adds | PyTorch | engine | | operators on PyTorch | ONNX |",
        "|---|---|---|---|---|---|---|---|",
    ]
    if (RESULTS / "benchmarks" / "networks.json").exists():
        lines += [_line(row) for row in record("benchmarks/networks")["rows"]]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    errors = [row[key] for key in ("compact_error", "engine_error") if row.get(key)]
    if errors:
        return f"| {row['network']} | | | | | | {_short(errors[0])} | |"
    report = row["compact"]
    shares = [f"{100 * report['after'][key] / report['before'][key]:.0f} %" for key in ("parameters", "mult_adds")]
    times = [f"{1e3 * row['times'][side]['median_s']:.1f} ms" for side in ("PyTorch", "engine")]
    onnx = "yes" if not row["onnx_error"] else "no"
    cells = [*shares, *times, f"{row['ratio']:.1f} ×", str(sum(row["on_torch"].values()) or "none"), onnx]
    return f"| {row['network']} | {' | '.join(cells)} |"


def _short(error: str) -> str:
    return error.partition(". ")[0].replace("|", "/")[:200]


FIGURES = {"networks": networks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words in the titles of networks")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of calls per side; 0 measures nothing")
    parser.add_argument("--engine", default="auto", help="as for wirings.engine.compile")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = []
    for title in NETWORKS:
        if not given.only or any(word.lower() in title.lower() for word in given.only):
            rows.append(examine(title, given.threads, given.seconds, given.engine))
            print(describe(rows[-1]), flush=True)
    settings = {"threads": given.threads, "density": DENSITY, "seconds": given.seconds, "engine": given.engine}
    save(given.out, {"benchmark": "networks", **machine("cpu"), "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
