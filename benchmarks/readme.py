"""Write the figures of README and docs from the records in `results/`; with --check, only compare them.

python -m benchmarks.readme [--check]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: keep this folder's select.py from shadowing Python's select
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import (
    adamw_defaults,
    agreement,
    block_models,
    choosing,
    collapse,
    engine,
    networks,
    reliability,
    rigl_adam,
    seen,
    step_cost,
    tuning,
    your_model,
)
from benchmarks.common import RESULTS, record
from wirings.train import bundled, recipes, results
from wirings.train.settings import from_mapping
from wirings.train.tables import by_rule
from wirings.train.tables import paper as tables
from wirings.train.tables.agreement import FEW_NOTE, seeds_cell
from wirings.train.tables.format import with_std

ROOT = Path(__file__).parents[1]
TABLES = ["table1", "table2", "appendix_b", "table4", "resnet"]


def demo() -> str:
    found = record("demo")
    outcomes = found["outcomes"]
    lines = ["| rule | edges | edges swapped while training | test accuracy |", "|---|---|---|---|"]
    for o in outcomes:
        mean, std = statistics.mean(o["accuracies"]), statistics.stdev(o["accuracies"])
        swapped = statistics.mean(o["swapped"])
        lines.append(f"| `{o['rule']}` | {o['edges']:,} | {swapped:,.0f} | {mean:.1f} ± {std:.1f} % |")
    seeds, seconds = len(outcomes[0]["accuracies"]), found["seconds"]
    return "\n".join([*lines, "", f"({seeds} seeds each, mean ± standard deviation; {seconds:.0f} s on one CPU core.)"])


def examples() -> str:
    titles = {
        "digits_sequence": "read row by row: `DiscreteGraph`, 128 nodes",
        "digits_static": "maps of 8 × 8: `StaticGraph`, 210 nodes",
    }
    lines = ["| | edges | `dnw` | `random` |", "|---|---|---|---|"]
    for name, title in titles.items():
        dnw, random = record(f"examples/{name}")["outcomes"]
        both = (dnw["accuracies"], random["accuracies"])
        shown = [f"{statistics.mean(a):.1f} ± {statistics.stdev(a):.1f} %" for a in both]
        lines.append(f"| {title} | {dnw['edges']:,} | {shown[0]} | {shown[1]} |")
    return "\n".join(lines)


def graphs() -> str:
    """The fastest way in half precision, and the same in float32, for each tiny classifier; then MobileNetV1-DNW."""
    lines = ["| | half precision | float32 (TF32) | float32 | memory, half precision |", "|---|---|---|---|---|"]
    rows = {(row["model"], row["precision"]): row for row in record("benchmarks/graphs-h200")["tiny"]["rows"]}
    for model, half in (("tiny_static", "bf16"), ("tiny_discrete", "bf16"), ("tiny_continuous", "fp16")):
        cells = [_fastest(rows[model, precision]) for precision in (half, "tf32", "fp32")]
        lines.append(f"| {model.removeprefix('tiny_')} | {' | '.join(cells)} | {_memory(rows[model, half])} |")
    for row in record("benchmarks/graphs-h200")["mobilenet"]["rows"]:
        name = f"MobileNetV1-DNW × {row['width']}, {row['image_size']} px, batch {row['batch']}"
        lines.append(f"| {name} | {_fastest(row)} | | | {_memory(row)} |")
    return "\n".join(lines)


def _fastest(row: dict[str, Any]) -> str:
    """A step's time in the fastest of the ways that it was measured in."""
    way, seconds = _quickest(row)
    more = f", {row['evaluations']} evaluations" if "evaluations" in row else ""
    return f"{1e3 * seconds:.2f} ms ({row['precision']}, {way}{more})"


def _quickest(row: dict[str, Any]) -> tuple[str, float]:
    """The fastest of the ways, and its seconds."""
    return min(((way, taken["median_s"]) for way, taken in row["times"].items()), key=lambda item: item[1])


def _memory(row: dict[str, Any]) -> str:
    return f"{row['peak_bytes'] / 2**30:.2f} GiB"


def dense() -> str:
    """The tiny classifiers on a CPU, wired and with all edges."""
    rows = record("benchmarks/graphs-cpu")["tiny"]["rows"]
    head = f"| a training step, batch {rows[0]['batch']} | 32,000 edges by dnw | all edges | |"
    lines = [head, "|---|---|---|---|"]
    for row in rows:
        wired, plain = (f"{1e3 * row['times'][side]['median_s']:.0f} ms" for side in ("wired", "dense"))
        lines.append(f"| `{row['model']}` | {wired} | {plain} | {100 * (row['ratio'] - 1):+.0f} % |")
    return "\n".join(lines)


def scaling() -> str:
    """Time and memory per allowed edge of a step of graphs with scalar states."""
    cpu, gpu = (record(f"benchmarks/graphs-{where}")["scaling"]["rows"] for where in ("cpu", "h200"))
    lines = ["| edges | nodes | allowed | CPU | | H200 | |", "|---|---|---|---|---|---|---|"]
    titles = {"blocks": "10 blocks, static", "complete": "all, 3 steps", "band": "21 per node, 3 steps"}
    for a, b in zip(cpu, gpu, strict=True):
        assert (a["kind"], a["nodes"]) == (b["kind"], b["nodes"])
        cells = [
            cell
            for row in (a, b)
            for cell in (_time(row["times"]["called"]["median_s"]), f"{row['bytes'] / 2**20:,.1f} MiB")
        ]
        lines.append(f"| {titles[a['kind']]} | {a['nodes']:,} | {a['allowed']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table(name: str) -> str:
    """One of the paper's tables, with every result."""
    return tables.markdown(tables.table(name, ROOT / "results")).replace(f"{ROOT}/", "../").rstrip()


def paper() -> str:
    """The paper's figures and the measured ones, for all rows that have results."""
    return agreement.table(ROOT / "results")


def scales() -> str:
    """Accuracies with norm scales drawn from U(0, 1) and initialized to 1, from the recipes and `results/scales`."""
    folders = (ROOT / "results", ROOT / "results" / "scales")
    lines = ["| | the paper | scales from U(0, 1) | scales from 1 |", "|---|---|---|---|"]
    for name in sorted(str(path.relative_to(folders[1])) for path in folders[1].glob("*/*")):
        reached: dict[str, list[float]] = {"uniform": [], "ones": []}
        for result in [result for folder in folders for result in results.find(folder, name)]:
            reached[from_mapping(result.settings).norm_scales].append(result.accuracy)
        paper = recipes.get(name).paper or {}
        cells = [with_std(paper.get("accuracy"), paper.get("std"), 1)]
        for found in reached.values():
            std = statistics.stdev(found) if len(found) > 1 else None
            cells.append(f"{with_std(statistics.mean(found), std, 2)} ({seeds_cell(len(found))})" if found else "")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"(The number of seeds is in brackets. {FEW_NOTE})"])


def again() -> str:
    """Recipes that were trained again with other code, compared with their rows in the tables."""
    lines = ["| | in the tables | trained again |", "|---|---|---|"]
    for folder in sorted({path.parent for path in (ROOT / "results" / "again").rglob("seed*.json")}):
        name = folder.relative_to(ROOT / "results" / "again").as_posix()
        known = [result.accuracy for result in results.find(ROOT / "results", name)]
        found = sorted((results.read(path) for path in folder.iterdir()), key=lambda one: (one.commit or "", one.seed))
        shown = f"{with_std(statistics.mean(known), statistics.stdev(known), 2)} ({seeds_cell(len(known))})"
        runs = ", ".join(_of_commit(list(group)) for _, group in itertools.groupby(found, lambda one: one.commit))
        lines.append(f"| `{name}` | {shown} | {runs} |")
    return "\n".join(lines)


def _of_commit(found: list[results.Result]) -> str:
    """The accuracies of runs of one commit: each, or their mean if there are three or more."""
    values = [one.accuracy for one in found]
    if len(found) < 3:
        return ", ".join(f"{one.accuracy:.2f} (seed {one.seed}, `{one.commit}`)" for one in found)
    return f"{with_std(statistics.mean(values), statistics.stdev(values), 2)} ({len(found)} seeds, `{found[0].commit}`)"


def dead() -> str:
    """Dead nodes and dead ends of learned and random wirings, with and without weight decay of edges, for seed 0."""
    lines = ["| | weight decay of edges | dead nodes | dead ends | accuracy |", "|---|---|---:|---:|---:|"]
    for name in ("dnw", "random"):
        for recipe, decay in ((f"table2/{name}", "as of all weights"), (f"table2/{name}-no_decay", "none")):
            (result,) = (one for one in results.find(ROOT / "results", recipe) if one.seed == 0)
            ends = result.edges - result.usable_edges
            lines.append(f"| `{recipe}` | {decay} | {result.dead_nodes:,} | {ends:,} | {result.accuracy:.2f} % |")
    return "\n".join(lines)


def times() -> str:
    """The fastest run of each recipe that did not share the GPU, with its step time and that of the bare benchmark."""
    rows = record("benchmarks/graphs-h200")
    bare = {row["model"]: row for row in rows["tiny"]["rows"] if row["precision"] == "bf16"}
    bare["table2"] = next(row for row in rows["mobilenet"]["rows"] if row["image_size"] == 32)
    lines = ["| | a step in training | the bare step | whole run |", "|---|---:|---:|---:|"]
    models = {"table1/static-dnw": "tiny_static", "table1/discrete-dnw": "tiny_discrete", "table2/dnw": "table2"}
    for recipe, model in models.items():
        alone = [result for result in results.find(ROOT / "results", recipe) if not result.most_others]
        run = min(alone, key=lambda result: result.train_s)
        ours, step = run.train_s / run.steps, _quickest(bare[model])[1]
        lines.append(f"| `{recipe}` | {1e3 * ours:.2f} ms | {1e3 * step:.2f} ms | {run.wall_s:.0f} s |")
    found = record("benchmarks/continuous-h200")
    first, *others = found["epoch_s"]
    most = (first + (found["epochs"] - 1) * max(others)) / 60
    lines.append(f"| `{found['recipe']}` |  |  | about {most:.0f} min of steps |")
    each = f"the first took {first:.1f} s, each of the others {min(others):.1f} to {max(others):.1f} s"
    alone = f"For the continuous graph, {len(others) + 1} epochs were trained without sharing the GPU: {each}."
    rest = (
        f"The estimate for {found['epochs']} epochs takes the slowest of these; later ones need a few more evaluations"
    )
    return "\n".join([*lines, "", f"({alone}", rest, "of the solver, and testing is not included.)"])


def tuned() -> str:
    """The accuracy of each coefficient of L1 on held-out training images."""
    lines = ["| coefficient | accuracy on held-out images |", "|---|---:|"]
    for path in sorted((ROOT / "results/tuning/l1_anneal").glob("*.json"), key=lambda path: float(path.stem)):
        lines.append(f"| {path.stem} | {results.read(path).accuracy:.2f} % |")
    return "\n".join(lines)


def compared(name: str) -> str:
    """A table that compares rules on one network: the rows that have results."""
    rows = [row for row in by_rule.table(name, ROOT / "results") if row.measured.seeds]
    if not any(row.recipe.startswith(f"{name}/") for row in rows):
        return f"No run of `{name}/…` is on record yet."
    return by_rule.markdown(rows).replace(f"{ROOT}/", "../").rstrip()


def zoo() -> str:
    """The trained networks in the package, from their cards."""
    head = "| network | rule | data | on the test set | over seeds | edges | multiply-adds | size |"
    lines = [head, "|---|---|---|---:|---:|---:|---:|---:|"]
    for name in bundled.names():
        card, folder = bundled.card_of(name), bundled.folder_of(name)
        result, size = card.result, sum(path.stat().st_size for path in folder.iterdir())
        rule, data = (result.settings[group]["name"] for group in ("rule", "data"))
        counts = ["" if count is None else f"{count:,}" for count in (result.edges, card.mult_adds)]
        cells = [f"`{name}`", f"`{rule}`", data, card.quality, card.over_seeds, *counts, f"{size / 1000:,.0f} kB"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cost() -> str:
    lines = ["| | time | against |", "|---|---|---|"]
    step = record("benchmarks/wired_step-cpu")
    settings = step["settings"]
    for row in step["rows"]:
        wired, dense = (1e3 * row["times"][side]["median_s"] for side in ("wired", "dense"))
        cores = "1 CPU core" if row["threads"] == 1 else f"{row['threads']} CPU cores"
        lines.append(
            f"| a training step, {settings['layers']} layers of width {settings['width']:,}, batch "
            f"{settings['batch']}, {100 * settings['density']:g} % of the edges, {cores} | {wired:.0f} ms | "
            f"dense: {dense:.0f} ms ({100 * (row['ratio'] - 1):+.0f} %) |"
        )
    for name, where in (("select-cpu", "2 CPU cores"), ("select-h200", "H200")):
        found = record(f"benchmarks/{name}")
        for row in found["rows"]:
            if row["n"] in (10**6, 10**8) and row["way"] == "called":
                lines.append(_selection(row, where))
            if row["n"] == 10**6 and row["way"] == "captured":
                lines.append(_selection(row, f"{where}, in a CUDA graph"))
    for name, where in CLIPPED.items():
        found = record(f"benchmarks/{name}")
        sizes, times = found["settings"], {row["clipping"]: row["median_s"] for row in found["rows"]}
        plain, used = times["no clipping"], times["edges in use"]
        lines.append(
            f"| a training step that clips gradients by the edges in use, GPT of {sizes['layers']} × {sizes['width']}, "
            f"{sizes['batch']} × {sizes['tokens']} tokens, {where} | {_time(used)} | without clipping: {_time(plain)} "
            f"({100 * (used / plain - 1):+.1f} %); by all edges: {100 * (times['all edges'] / plain - 1):+.1f} % |"
        )
    return "\n".join(lines)


CLIPPED = {"clipping-cpu": "2 CPU cores", "clipping-h200": "H200, called", "clipping-small-h200": "H200, called"}
"""Records of clipping, and where they were made."""


def blocks() -> str:
    there = (RESULTS / "benchmarks/block_models-h200.json").exists()
    return block_models.table(record("benchmarks/block_models-h200") if there else None)


def _selection(row: dict[str, Any], where: str) -> str:
    times = {name: taken["median_s"] for name, taken in row["times"].items()}
    best = min((times[name], name) for name in ("sort", "topk", "kthvalue") if name in times)
    power = len(str(row["n"])) - 1
    return (
        f"| choosing 10 % of 10{'⁰¹²³⁴⁵⁶⁷⁸⁹'[power]} edges, {where} | {_time(times['choose'])} | "
        f"{best[1]}: {_time(best[0])} ({best[0] / times['choose']:.1f}×) |"
    )


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"


PAGES = {
    "README.md": {"demo": demo},
    "docs/costs.md": {
        "cost": cost,
        "steps": lambda: step_cost.table(record("benchmarks/step_cost-h200")),
        "blocks": blocks,
        "graphs": graphs,
        "shipped": engine.shipped,
    },
    "docs/transformers.md": {
        "tuned": tuning.tables,
        "rigl_adam": lambda: rigl_adam.table(record("benchmarks/rigl_adam-cpu")),
        "adamw_defaults": lambda: adamw_defaults.tables(record("benchmarks/adamw_defaults-cpu")),
    }
    | {name: functools.partial(compared, name) for name in ("text", "shakespeare", "vit", "translate")},
    "docs/keep_sparse.md": {"pruned": lambda: compared("pruned")},
    "docs/tutorials/neural_graph.md": {"examples": examples},
    "docs/your_model.md": {**your_model.FIGURES, "tuned_rates": lambda: tuning.ratios("text")},
    "docs/results.md": {name: functools.partial(table, name) for name in TABLES}
    | {"paper": paper, "best": choosing.best, "ste": choosing.ste}
    | {"times": times, "scales": scales, "again": again, "dead": dead, "tuned": tuned},
    "docs/rules.md": {"choosing": choosing.choosing},
    "docs/engine.md": {**engine.FIGURES, **networks.FIGURES},
    "docs/gallery.md": seen.FIGURES,
    "docs/zoo.md": {"zoo": zoo},
    "docs/theory.md": {"collapse": lambda: collapse.table(record("benchmarks/collapse-cpu"))},
    "docs/reliability.md": reliability.FIGURES,
    "docs/graphs.md": {"scaling": scaling, "dense": dense},
}


def rendered(page: str) -> str:
    """A page with its figures updated from the records."""
    text = (ROOT / page).read_text()
    for name, make in PAGES[page].items():
        before, found, rest = text.partition(f"<!-- results:{name} -->\n")
        assert found, f"{page} has no place for the results of {name}"
        text = f"{before}{found}{make()}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    for page in PAGES:
        after = rendered(page)
        if not check:
            (ROOT / page).write_text(after)
        elif after != (ROOT / page).read_text():
            sys.exit(f"{page} does not match results/: run python -m benchmarks.readme")


if __name__ == "__main__":
    main()
