"""Choosing k of n edges: `wirings.choose` and `wirings.real_edges` compared with sort, topk and kthvalue of PyTorch.

For a fair comparison, all of them produce a mask of exactly k edges, ties included. A copy of the weights is the lower
bound. The record also contains the bare calls, which produce no mask.

    python -m benchmarks.select [--device cuda] [--most 1e8] [--density 0.1] [--out results/benchmarks/select-cpu.json]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a script: keep this folder's select.py from shadowing Python's select
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from torch import Tensor

import wirings
from benchmarks.common import captured, compare, machine, save


def by_sort(weight: Tensor, k: int) -> Tensor:
    chosen = weight.abs().sort(descending=True, stable=True).indices[:k]
    return torch.zeros_like(weight, dtype=torch.bool).index_fill_(0, chosen, True)


def by_topk(weight: Tensor, k: int) -> Tensor:
    chosen = weight.abs().topk(k, sorted=False).indices
    return torch.zeros_like(weight, dtype=torch.bool).index_fill_(0, chosen, True)


def by_kthvalue(weight: Tensor, k: int) -> Tensor:
    size = weight.abs()
    least = size.kthvalue(size.numel() - k + 1).values
    above, equal = size > least, size == least
    return above | (equal & (equal.cumsum(0) <= k - above.sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--most", type=float, default=1e8, help="largest n")
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of calls per method")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = options.device
    about = machine(device)
    print(f"{about['hardware']}, {about['threads']} threads, {about['versions']}")
    names = ["copy", "sort", "topk", "kthvalue", "choose", "real_edges"]
    print(f"{'n':>12} " + " ".join(f"{name:>12}" for name in names) + "   choose / best of the three (median ms)")
    rows, worst = [], 0.0
    for n in [10**4, 10**5, 640_000, 10**6, 8_650_000, 10**7, 10**8]:
        if n > options.most:
            break
        torch.manual_seed(0)
        # Uniform, as PyTorch initializes layers. k is a tensor, so that the host does not synchronize with the GPU.
        weight = torch.rand(n, device=device).mul_(2).sub_(1)
        k = int(options.density * n)
        count = torch.tensor(k, device=device)
        masks = {
            "sort": by_sort(weight, k),
            "kthvalue": by_kthvalue(weight, k),
            "choose": wirings.choose(weight, count),
        }
        assert all(torch.equal(mask, masks["sort"]) for mask in masks.values()), "the methods chose different edges"
        size = weight.abs()
        sides = {
            "copy": weight.clone,
            "sort": lambda w=weight, k=k: by_sort(w, k),
            "topk": lambda w=weight, k=k: by_topk(w, k),
            "kthvalue": lambda w=weight, k=k: by_kthvalue(w, k),
            "choose": lambda w=weight, k=count: wirings.choose(w, k),
            "real_edges": lambda w=weight, k=count: torch.ops.wirings.real_edges(w, k, None),
            "bare sort": size.sort,
            "bare topk": lambda w=size, k=k: w.topk(k, sorted=False),
            "bare kthvalue": lambda w=size, k=k: w.kthvalue(w.numel() - k),
        }
        if device == "cuda" and n > 10**6:
            del sides["kthvalue"], sides["bare kthvalue"]  # up to half a second per call, far from the best
        ways = {"called": sides}
        if device == "cuda":
            ways["captured"] = {name: captured(run) for name, run in sides.items()}
        for way, runs in ways.items():
            taken = compare(runs, device, options.seconds)
            best = min(taken[name]["median_s"] for name in ("sort", "topk", "kthvalue") if name in taken)
            ratio = taken["choose"]["median_s"] / best
            worst = max(worst, ratio)
            cells = [f"{1e3 * taken[name]['median_s']:12.4f}" if name in taken else f"{'–':>12}" for name in names]
            print(f"{n:12,} " + " ".join(cells) + f"   {ratio:.3f} {way}", flush=True)
            rows.append({"n": n, "k": k, "way": way, "times": taken, "ratio_to_best": ratio})
    print(f"worst ratio: {worst:.3f} ({'met' if worst <= 1.1 else 'NOT met'}: at most 1.1)")
    save(options.out, {"benchmark": "select", "density": options.density, **about, "device": device, "rows": rows})
    raise SystemExit(worst > 1.1)


if __name__ == "__main__":
    main()
