"""2:4 products of PyTorch in training, compared with dense ones: linear layers in bfloat16 with transposable masks.

For each layer and number of tokens:

- ``forward``: x @ Wᵀ, with W packed before.
- ``gradient of inputs``: grad @ W, with Wᵀ packed before, which is 2:4 only with a transposable mask.
- ``gradient of weight``: gradᵀ @ x, dense on both sides, since it goes to hallucinated edges too.
- ``choose and pack``: what has to be done with a weight in every step before the products. "dense" is what wired layers
  do anyway: set the edges outside a known mask to zero.
- ``step``: with a known mask, set the others to zero, pack, forward, and both gradients. No bias, no optimizer; where
  a mask is chosen in every step, that is to be added from the part before.

Sides: "2:4" are PyTorch's operators of cuSPARSELt, which return rows of tokens as dense products do; "searched" takes
the algorithm that its search finds; "packed by tile" packs both directions with the operator that PyTorch's training
support has for it, which also chooses a mask, greedily; "F.linear" is PyTorch's tensor subclass as it comes; "CUTLASS"
is its other implementation. A side that fails, or whose results differ from the dense ones by more than rounding, is
recorded with the reason. Everything is captured in CUDA graphs where possible, since cuSPARSELt prepares each call for
about 0.4 ms on the host; the row says if it was called instead. Sides take turns in one process after a warm-up.

    python -m benchmarks.semi_structured_training [--shapes 4096x4096x8192 ...] [--seconds 0.2]
        [--out results/benchmarks/semi_structured_training-h200.json]
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import captured, compare, machine, save
from wirings.compaction.semi_structured import CAPABILITY
from wirings.selection.transposable_groups import TransposableGroups
from wirings.selection.weight_layout import WeightLayout

LAYERS = ((3072, 768), (768, 3072), (768, 768), (2304, 768), (4096, 4096))
"""Outputs and inputs: those of GPT-2 small, and one large layer."""
TOKENS = (8192, 16384)
GREEDY = "largest_abs_values_greedy"
"""How `_sparse_semi_structured_tile` chooses a mask by magnitude. Its default ranks signed values."""
LARGEST_DIFFERENCE = 2e-2
"""Of the norm of a result, before it counts as wrong: several times what rounding in bfloat16 makes."""
Run = Callable[[], Any]


@dataclass
class Layer:
    """A layer's tensors."""

    weight: Tensor
    """All weights, (outputs, inputs)."""
    master: Tensor
    """The same in float32, from which masks are chosen."""
    mask: Tensor
    used: Tensor
    """The weights with zeros outside the mask."""
    x: Tensor
    grad: Tensor
    groups: TransposableGroups

    def masked(self) -> Tensor:
        return torch.where(self.mask, self.weight, 0.0)


def make(outputs: int, inputs: int, tokens: int, device: str) -> Layer:
    """Random weights with their best transposable mask, inputs, and a gradient of the outputs."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    weight = (torch.randn(outputs, inputs, device=device) / inputs**0.5).to(dtype)
    x, grad = (torch.randn(tokens, width, device=device, dtype=dtype) for width in (inputs, outputs))
    groups = TransposableGroups(WeightLayout((outputs, inputs), ("out", "in")), 4)
    mask = groups.choose(weight, 2, None, None)
    return Layer(weight, weight.float(), mask, torch.where(mask, weight, 0.0), x, grad, groups)


def pack(weight: Tensor) -> Tensor:
    """A weight for `multiply`, by cuSPARSELt."""
    return torch._cslt_compress(weight)


def pack_both(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight and its transpose."""
    return pack(weight), pack(weight.t().contiguous())


def tile_both(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same in one kernel. The mask that it chooses is that of the weight, if it has one."""
    packed, _, packed_t, _, _ = torch._sparse_semi_structured_tile(weight, algorithm=GREEDY, use_cutlass=False)
    return packed, packed_t


def multiply(packed: Tensor, x: Tensor, algorithm: int = 0) -> Tensor:
    """``x @ weight.T`` for a packed weight, laid out as the dense product."""
    return torch._cslt_sparse_mm(packed, x.t(), transpose_result=True, alg_id=algorithm)


def searched(packed: Tensor, x: Tensor) -> Run:
    algorithm = int(torch._cslt_sparse_mm_search(packed, x.t(), transpose_result=True))
    return lambda: multiply(packed, x, algorithm)


def cutlass(weight: Tensor, x: Tensor, transposed: bool) -> Run:
    made = torch._sparse_semi_structured_tile(weight, algorithm=GREEDY, use_cutlass=True)
    packed, meta = made[2:4] if transposed else made[:2]
    return lambda: torch._sparse_semi_structured_mm(packed, meta, x.t()).t().contiguous()


def as_subclass(weight: Tensor, x: Tensor) -> Run:
    sparse = torch.sparse.to_sparse_semi_structured(weight.contiguous())
    return lambda: F.linear(x, sparse)


def bound(run: Callable[..., Any], *arguments: Any) -> Run:
    return lambda: run(*arguments)


def sides(layer: Layer) -> dict[str, dict[str, Callable[[], Run]]]:
    """For each part, its sides; each is made by a function that may fail."""
    x, grad, used = layer.x, layer.grad, layer.used

    def products(of: Tensor, times: Tensor, dense: Run, transposed: bool) -> dict[str, Callable[[], Run]]:
        return {
            "dense": lambda: dense,
            "2:4": lambda: bound(multiply, pack(of), times),
            "2:4, searched": lambda: searched(pack(of), times),
            "2:4, packed by tile": lambda: bound(multiply, tile_both(used)[transposed], times),
            "2:4, F.linear": lambda: as_subclass(of, times),
            "2:4, CUTLASS": lambda: cutlass(used, times, transposed),
        }

    def step(packs: Callable[[Tensor], tuple[Tensor, ...]]) -> Run:
        def run() -> tuple[Tensor, ...]:
            weight = layer.masked()
            packed = packs(weight)
            out = multiply(packed[0], x) if packed else F.linear(x, weight)
            to_inputs = multiply(packed[1], grad) if len(packed) > 1 else grad @ weight
            return out, to_inputs, grad.t() @ x

        return run

    return {
        "forward": products(used, x, lambda: F.linear(x, used), False),
        "gradient of inputs": products(used.t().contiguous(), grad, lambda: grad @ used, True),
        "gradient of weight": {"dense": lambda: lambda: grad.t() @ x},
        "choose and pack": {
            "dense": lambda: layer.masked,
            "exact mask": lambda: bound(layer.groups.choose, layer.master, 2, None, None),
            "pack one": lambda: bound(pack, used),
            "pack both": lambda: bound(pack_both, used),
            "tile": lambda: bound(tile_both, layer.weight),
        },
        "step": {
            "dense": lambda: step(lambda weight: ()),
            "2:4 forward": lambda: step(lambda weight: (pack(weight),)),
            "2:4 both": lambda: step(pack_both),
            "2:4 both, packed by tile": lambda: step(tile_both),
        },
    }


def difference(found: Any, expected: Any) -> float:
    """The largest difference of two results, or tuples of them, relative to the norm of the expected one."""
    pairs = zip(*((one,) if isinstance(one, Tensor) else one for one in (found, expected)), strict=True)
    norms = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]
    return math.nan if any(map(math.isnan, norms)) else max(norms)


def reason(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def replayed(run: Run) -> tuple[Run, str, str | None]:
    """A call without the host's overhead, if it can be captured; how it runs; and why it was not captured."""
    stream = torch.cuda.current_stream()
    try:
        return captured(run), "captured", None
    except Exception as error:
        torch.cuda.set_stream(stream)  # a failed capture may leave its own one
        return run, "called", reason(error)


def measure(part: str, made: dict[str, Callable[[], Run]], device: str, seconds: float) -> list[dict[str, Any]]:
    """Times of the sides of one part, and why others failed. Results are compared with "dense" where they are alike."""
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Run] = {}
    alive = []  # a captured call reads tensors that only the call itself refers to
    expected: Any = None
    for name, build in made.items():
        rows[name] = row = {"part": part, "side": name}
        try:
            run = build()
            result = run()
            if name == "dense":
                expected = result
            elif part != "choose and pack" and expected is not None:
                row["difference"] = difference(result, expected)
                if not row["difference"] <= LARGEST_DIFFERENCE:
                    row["error"] = f"its results differ from the dense ones by {row['difference']:.2g} of their norm"
                    continue
            runs[name], row["way"] = run, "called"
            del result
        except Exception as error:  # not built, not supported, or out of memory
            row["error"] = reason(error)
            continue
        if device == "cuda":
            alive.append(run)
            runs[name], row["way"], failed = replayed(run)
            if failed is not None:
                row["not_captured"] = failed
    try:
        for name, times in compare(runs, device, seconds).items():
            rows[name] |= times
    except Exception as error:
        for name in runs:
            rows[name]["error"] = f"while it was timed, {reason(error)}"
    dense = rows["dense"].get("median_s")
    for row in rows.values():
        if dense is not None and "median_s" in row:
            row["gain"] = dense / row["median_s"]
    return list(rows.values())


def described(row: dict[str, Any]) -> str:
    """A row in one line."""
    start = f"  {row['part']:18} {row['side']:24}"
    if "median_s" not in row:
        return f"{start} failed: {row.get('error', 'not timed')}"
    median, low, high = (1e3 * row[name] for name in ("median_s", "q1_s", "q3_s"))
    gain = f", {row['gain']:5.2f} x dense" if "gain" in row else ""
    return f"{start} {median:8.4f} ms ({low:.4f} to {high:.4f}, n = {row['n']}){gain}, {row['way']}"


def table(record: dict[str, Any]) -> str:
    """The times as a Markdown table."""
    lines = ["| inputs → outputs, tokens | | | ms | quartiles | × dense |", "|---|---|---|---:|---:|---:|"]
    for row in record["rows"]:
        layer = f"{row['inputs']:,} → {row['outputs']:,}, {row['tokens']:,}"
        start = f"| {layer} | {row['part']} | {row['side']} |"
        if "median_s" not in row:
            lines.append(f"{start} {row.get('error', 'not timed')} | | |")
            continue
        median, low, high = (f"{1e3 * row[name]:.4f}" for name in ("median_s", "q1_s", "q3_s"))
        gain = f"{row['gain']:.2f}" if "gain" in row else ""
        called = "" if row["way"] == "captured" else f" ({row['way']})"
        lines.append(f"{start} {median}{called} | {low} to {high} | {gain} |")
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return "\n".join([*lines, "", f"({record['hardware']}, bfloat16, {versions}; medians of turns.)"])


def check_gpu() -> str:
    """The device; exits with a sentence if it has no 2:4 tensor cores."""
    found = "no CUDA device"
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability >= CAPABILITY:
            return "cuda"
        found = f"{torch.cuda.get_device_name()} of compute capability {capability[0]}.{capability[1]}"
    raise SystemExit(
        f"This benchmark needs a GPU with 2:4 tensor cores (compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or "
        f"more), got {found}."
    )


def cusparselt_version() -> int | None:
    try:
        return torch.backends.cusparselt.version()
    except Exception:  # this PyTorch does not tell
        return None


def sizes_of(shapes: Iterable[str]) -> list[tuple[int, int, int]]:
    """Outputs, inputs and tokens from texts such as ``3072x768x8192``."""
    found = []
    for shape in shapes:
        try:
            outputs, inputs, tokens = map(int, shape.split("x"))
        except ValueError:
            raise SystemExit(f"--shapes expects OUTPUTSxINPUTSxTOKENS such as 3072x768x8192, got {shape}.") from None
        found.append((outputs, inputs, tokens))
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = [f"{outputs}x{inputs}x{tokens}" for outputs, inputs in LAYERS for tokens in TOKENS]
    parser.add_argument("--shapes", nargs="+", default=default, help="outputs x inputs x tokens")
    parser.add_argument("--seconds", type=float, default=0.2, help="seconds of calls per side")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shapes, device = sizes_of(options.shapes), check_gpu()
    about = machine(device)
    print(f"{about['hardware']}, {about['versions']}")
    settings = {"shapes": options.shapes, "seconds": options.seconds, "cusparselt": cusparselt_version()}
    record = {"benchmark": "semi_structured_training", "settings": settings, **about, "device": device, "rows": []}
    warnings.filterwarnings("ignore", message="The PyTorch API of SparseSemiStructuredTensor", category=UserWarning)
    for outputs, inputs, tokens in shapes:
        size = {"outputs": outputs, "inputs": inputs, "tokens": tokens}
        print(f"{inputs} inputs, {outputs} outputs, {tokens} tokens")
        try:
            parts = sides(make(outputs, inputs, tokens, device))
        except Exception as error:
            record["rows"].append({**size, "part": "all", "side": "all", "error": reason(error)})
            print(f"  failed: {reason(error)}", flush=True)
            parts = {}
        for part, made in parts.items():
            rows = measure(part, made, device, options.seconds)
            record["rows"] += [{**size, **row} for row in rows]
            print(*map(described, rows), sep="\n", flush=True)
        save(options.out, record)  # after every layer, so that little is lost
    print(table(record))


if __name__ == "__main__":
    main()
