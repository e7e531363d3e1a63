"""Tables that compare the rules, made from results; `benchmarks.readme` writes them into the docs."""

from __future__ import annotations

from pathlib import Path

from wirings import rules
from wirings.budgets.schedules import RAMP
from wirings.train import recipes
from wirings.train.tables import equal_cost, leaderboard
from wirings.train.tables import paper as tables
from wirings.train.tables.agreement import FEW_NOTE, seeds_cell
from wirings.train.tables.leaderboard import Leaderboard, Standing

ROOT = Path(__file__).parents[1]
WHEN = {
    "dnw": "the default: no settings, no memory, and any edge can still enter at the end",
    "decayed_gradient": "very few edges, and the wiring should settle: starts as `dnw`, ends with a fixed wiring",
    "soft_threshold": 'few edges, and all fit at first: with a `schedule` and `share="global"`, as in its papers',
    "top_kast": "the gradient of all weights does not fit",
    "str": "only the total is given, and layers should learn their shares of it",
    "acdc": "all edges fit in training, and a dense network is wanted beside the sparse one",
    "gmp": "a well-known pruning method, and all edges fit at first",
    "l1_anneal": "the same, with weights shrunk towards zero before they are removed",
    "targeted_dropout": "one training, after which the density may still be lowered",
    "set": "sparse from beginning to end, in memory and time; needs only the gradient of real edges",
    "rigl": "the same, if the gradient of all edges is available from time to time",
    "sparse_momentum": "edges should move between layers; needs the momentum of all weights",
    "fine_tune": "you already have a trained network",
    "keep": "your network is pruned already, and exactly its zeros must stay",
    "lottery": "to study lottery tickets; trains twice",
    "random": "the baseline: shows what learning a wiring is worth",
    "expander": "the same, with equally many edges into every node",
    "no_update": "an ablation: shows what the gradient of hallucinated edges is worth",
    "dense": "all edges: shows what sparsity costs",
}
"""When to use a rule."""
HEADER = ("rule", "when to use it", "gradient", "edges at first", "remembers", "a step")
COLUMNS = ("Table 2's network", "ResNet, 10 %", "5 %", "2 %")
DENSE = {0: "table2/complete", 1: "resnet/dense", 2: "resnet/dense", 3: "resnet/dense"}
"""For each column: the recipe of the same network with all its edges, which the leaderboard does not list."""
NOTE = (
    "(Accuracy on CIFAR-10 in percent, mean ± standard deviation; in brackets the number of seeds and the variant: "
    "cubic, a schedule from all edges to the same final number; global, all layers are ranked together; erk, shares "
    "by ERK. Without a variant it is the plain rule, which comes first if a variant is better. –: not measured, or no "
    "such row. Gradient: whether training needs the gradient of all edges, of some, or of real edges only. Edges at "
    "first: those that the first step uses, without a schedule, at a density of 10 %. Remembers: bytes per allowed "
    f"edge. A step: its time relative to `dnw` on Table 2's network, measured side by side. {FEW_NOTE})"
)


def choosing(folder: Path = ROOT / "results") -> str:
    """One row per rule: when to use it, what it costs, and the accuracy it reached."""
    assert set(WHEN) == set(rules.names()), "WHEN must describe every rule"
    boards = leaderboard.boards(folder)
    assert len(boards) == len(COLUMNS)
    lines = [f"| {' | '.join((*HEADER, *COLUMNS))} |", "|---|---|" + "---:|" * (len(HEADER) + len(COLUMNS) - 2)]
    for rule, when in WHEN.items():
        needs = leaderboard.needs(rules.get(rule), 0.1)
        costs = (needs.gradient, needs.first, str(needs.remembered), _time(rule, boards[0]))
        reached = (_reached(rule, board, folder, DENSE[place]) for place, board in enumerate(boards))
        lines.append(f"| {' | '.join((f'`{rule}`', when, *costs, *reached))} |")
    return "\n".join([*lines, "", NOTE])


def _time(rule: str, board: Leaderboard) -> str:
    timed = [one for one in board.standings if one.rule == rule and one.ratio is not None]
    return f"{(_plain(timed) or timed[0]).ratio:.2f} ×" if timed else "–"


def _of(rule: str, board: Leaderboard) -> list[Standing]:
    """The rows of a rule that have results, the best first."""
    return [one for one in board.standings if one.rule == rule and one.row.mean is not None]


def _plain(found: list[Standing]) -> Standing | None:
    """The row of a rule with default settings: no schedule, uniform shares."""
    return next((one for one in found if not _variant(one)), None)


def _reached(rule: str, board: Leaderboard, folder: Path, dense: str) -> str:
    if rule == "dense":
        row = tables.row_of(recipes.get(dense), folder)
        return _cell(row, "")
    found = _of(rule, board)
    plain = _plain(found)
    shown = [one for one in found if one is plain] + [one for one in found[:1] if one is not plain]
    return "; ".join(_cell(one.row, _variant(one)) for one in shown) or "–"


def _cell(row: tables.TableRow, variant: str) -> str:
    if row.mean is None:
        return "–"
    shown = f"{row.mean:.1f}" if row.std is None else f"{row.mean:.1f} ± {row.std:.1f}"
    return f"{shown} ({seeds_cell(len(row.seeds))}{variant})"


def _variant(one: Standing) -> str:
    """How a row differs from its rule's plain row: by a schedule, its shares, or a suffix of its name."""
    settings = recipes.get(one.row.recipe).settings
    schedule, share = settings.rule.options.get("schedule"), settings.model.options.get("share", "uniform")
    name = one.row.recipe.partition("/")[2].removeprefix("mobilenet-").removeprefix("resnet-")
    rest = name.partition(one.rule)[2].split("-")[0].strip("_")
    parts = [] if schedule is None else [schedule.get("kind", RAMP["kind"])]
    parts += [share] if share != "uniform" else []
    parts += [settings.model.options["structure"]] if "structure" in settings.model.options else []
    parts += [rest] if rest not in ("", "k", *parts) else []  # k: the final number of edges from the start, the default
    return "".join(f", {part}" for part in parts)


def best(folder: Path = ROOT / "results") -> str:
    """For each network: `random`, `dnw`, the best rule with the same number of edges, and the dense network."""
    lines = ["| | `random` | `dnw` | the best rule | all edges |", "|---|---|---|---|---|"]
    for board, dense in zip(leaderboard.boards(folder), DENSE.values(), strict=True):
        plain = [_plain(_of(rule, board)) for rule in ("random", "dnw")]
        first = next((one for one in board.standings if one.row.mean is not None), None)
        cells = ["–" if one is None else _with_cost(one) for one in plain]
        cells += ["–" if first is None else f"`{first.rule}`: {_with_cost(first)}"]
        cells += [_cell(tables.row_of(recipes.get(dense), folder), "")]
        lines.append(f"| {board.title.partition(';')[0]} | {' | '.join(cells)} |")
    note = (
        "(Accuracy on CIFAR-10 in percent, number of seeds in brackets; multiply-adds of one image. Cubic: a schedule "
        "from all edges to the same final number. Global: all layers are ranked together, which puts more edges where "
        f"feature maps are large. {FEW_NOTE})"
    )
    return "\n".join([*lines, "", note])


def _with_cost(one: Standing) -> str:
    cost = "" if one.row.mult_adds is None else f", {one.row.mult_adds / 1e6:.1f}M"
    return f"{_cell(one.row, _variant(one))}{cost}"


def ste(folder: Path = ROOT / "results") -> str:
    """The leaderboard."""
    return leaderboard.markdown(equal_cost.boards(folder)).replace(f"{ROOT}/", "../").rstrip()
