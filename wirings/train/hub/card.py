"""The model card of a network: ``README.md``, with the metadata that the Hub reads at its head."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from wirings.compaction import CompactModel
from wirings.errors import WiringError
from wirings.history import History, snapshot_of
from wirings.models.registry import built_as
from wirings.train.hub.weights import file_bytes, model_bytes
from wirings.train.results import Result
from wirings.train.yaml_io import dump_yaml
from wirings.utils.text import LONGEST, as_markdown, printable, shortened
from wirings.wire.sparse_state import SparseState

if TYPE_CHECKING:
    from wirings.draw.gallery import Picture

PAPER = "[Discovering Neural Wirings](https://arxiv.org/abs/1906.00586)"
_TASKS = {"bleu": "translation", "bits_per_byte": "text-generation", "nats": "text-generation"}
"""The Hub's names of tasks, by metric; all others classify images."""
_BEST_PICTURES = ("transformer", "blocks", "circle", "layers", "adjacency")


@dataclass(frozen=True)
class Card:
    """The text of a model card, and the picture that it shows."""

    text: str
    picture: Picture | None


def make_card(
    name: str,
    model: nn.Module,
    results: Sequence[Result],
    history: History | None,
    picture: str,
    *,
    best: bool,
    edges: SparseState | None = None,
) -> Card:
    """Make the card of a network.

    Args:
        name: what the network is called on the Hub, or in a folder.
        model: the network.
        results: the result of the network first, then those of other seeds.
        history: the wiring to draw, if not that of the model.
        picture: the name of the picture's file.
        best: whether the network is that of the best epoch, while results are those of the last.
        edges: the weights, if only the real edges are in the file.
    """
    if not results:
        raise WiringError(
            "a model card is made from the result of a run, but there is none. Pass results=, such as the folder of "
            "the finished run, or card=False for no card."
        )
    drawn, first = _picture(model, history), results[0]
    lines = [
        f"# {as_markdown(name)}",
        "",
        f"{_kind(first)} trained with wirings, a PyTorch library that learns how a network is wired while it trains "
        f"({PAPER}).",
        "",
        *([f"![The wiring]({picture})", ""] if drawn is not None else []),
        "| | |",
        "|---|---|",
        *(f"| {label} | {as_markdown(value)} |" for label, value in _rows(model, results, best, edges)),
        "",
        "## Load it",
        "",
        "```python",
        "import wirings  # with the extra hub",
        "",
        f"model = wirings.hub.from_pretrained({printable(name)!r})",
        "```",
        "",
        _what_it_is(model, edges),
        *_command(first),
    ]
    return Card(f"---\n{dump_yaml(_metadata(name, model, results))}---\n\n" + "\n".join(lines) + "\n", drawn)


def _setting(result: Result, group: str, default: str) -> str:
    """The name of a run's rule or data. Results are edited by hand, so that settings may be of any form."""
    settings = result.settings.get(group)
    return str(settings.get("name", default) if isinstance(settings, dict) else default)


def _rule(result: Result) -> str:
    return _setting(result, "rule", "dense")


def _kind(result: Result) -> str:
    if result.edges is None:
        return "A dense network,"
    return f"A sparse network, wired by the rule {as_markdown(_rule(result))} and"


def _rows(
    model: nn.Module, results: Sequence[Result], best: bool, edges: SparseState | None
) -> Iterable[tuple[str, str]]:
    first = results[0]
    metric = first.measured_by
    yield "recipe", first.recipe
    if (built := built_as(model)) is not None:
        yield "network", built.name
    yield "data", _setting(first, "data", "")
    label = f"test {metric.label}"
    if len(results) > 1:
        scores = [result.score for result in results]
        seeds = ", ".join(str(seed) for seed in sorted(result.seed for result in results))
        value = metric.format(statistics.mean(scores), statistics.stdev(scores))
        yield label, f"{value} (mean ± standard deviation of {len(results)} runs, seeds {seeds})"
        yield f"{label}, this run", f"{first} (seed {first.seed})"
    else:
        yield label, f"{first} (one run, seed {first.seed})"
    if best:
        yield "weights", "those of the best epoch on the test data; the figures above are of the last epoch"
    yield from _sizes(model, first)
    if edges is not None:
        file, dense = (size / 1e6 for size in (file_bytes(edges), model_bytes(edges)))
        yield "weights file", f"{file:,.2f} MB, without the zeros; {dense:,.2f} MB in memory"
    unit = f"{first.epochs:,} epochs, {first.steps:,} steps"
    beside = f", beside up to {first.most_others} other runs" if first.most_others else ""
    yield "training", f"{unit}, {first.train_s:,.0f} s on {first.hardware}{beside}"
    if first.overrides:
        changes = ", ".join(f"{key} = {value}" for key, value in first.overrides.items())
        yield "changed settings", changes


def _sizes(model: nn.Module, result: Result) -> Iterable[tuple[str, str]]:
    report = model.report if isinstance(model, CompactModel) else None
    if report is not None:
        yield "edges", f"{report.after.edges:,}, layers that were not wired included"
        yield "parameters", f"{report.after.parameters:,} that are not zero"
        yield "multiply-adds", f"{report.after.mult_adds:,} for one example"
        return
    if result.edges is not None:
        dead = "" if not result.dead_nodes else f", {result.dead_nodes:,} dead nodes"
        yield "edges", f"{result.edges:,}{dead}"
    yield "parameters", f"{result.params:,}"
    if result.mult_adds is not None:
        yield "multiply-adds", f"{result.mult_adds:,} for one example"


def _what_it_is(model: nn.Module, edges: SparseState | None) -> str:
    if isinstance(model, CompactModel):
        return (
            "This is a compact model: dead nodes are removed and norms are folded. Its outputs are those of the "
            "trained network; `wirings.engine.compile(model)` makes it fast on a CPU."
        )
    if edges is not None:
        return (
            "The model is in evaluation mode, a plain network with exact zeros, which `wirings.compact(model)` can "
            "remove. Its file is in the safetensors format, but holds only the weights that are not zero and their "
            "places: load it with the line above, not with other programs. Nothing in the files is executed."
        )
    return (
        "The model is in evaluation mode. If it is wired, training can go on from here; `wirings.finalize_(model)` "
        "turns it into plain modules with exact zeros, and `wirings.compact(model)` removes what is dead. Nothing in "
        "the files is executed."
    )


def _command(result: Result) -> list[str]:
    if result.overrides or not re.fullmatch(r"\w+/[\w.-]+", result.recipe, re.ASCII):  # a recipe that others have
        return []
    command = f"wirings train {shlex.quote(result.recipe)} --seed {result.seed}"
    return ["", "## Train it again", "", "```console", f"$ {command}", "```"]


def _metadata(name: str, model: nn.Module, results: Sequence[Result]) -> dict[str, Any]:
    first = results[0]
    metric, data = first.measured_by, _plain(_setting(first, "data", "unknown"))
    kind = "compact" if isinstance(model, CompactModel) else None
    task = _TASKS.get(metric.name, "image-classification")
    value = statistics.mean(result.score for result in results)
    measured = {"type": metric.name, "value": round(value, 4), "name": f"Test {metric.label}"}
    return {
        "library_name": "wirings",
        "tags": [tag for tag in ("wirings", "sparse", _plain(_rule(first)), kind) if tag is not None],
        "pipeline_tag": task,
        "model-index": [
            {
                "name": _plain(name),
                "results": [
                    {"task": {"type": task}, "dataset": {"name": data, "type": data}, "metrics": [measured]},
                ],
            }
        ],
    }


def _plain(text: str) -> str:
    """A name as the Hub's metadata shows it, in YAML."""
    return printable(shortened(text, LONGEST))


def _picture(model: nn.Module, history: History | None) -> Picture | None:
    """The picture of a wiring that says most; None for a network without a wiring, such as a dense one."""
    if history is None:
        try:
            history = snapshot_of(model)
        except WiringError:
            return None
    try:
        from wirings.draw.gallery import pictures
    except ImportError as error:
        raise WiringError(
            "the picture of a model card needs matplotlib: pip install wirings[hub]. Or pass card=False."
        ) from error
    found = pictures(history)
    return next((found[name] for name in _BEST_PICTURES if name in found), None)
