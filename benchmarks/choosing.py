"""The tables of rules in docs/rules.md and docs/results.md, from results; `benchmarks.readme` writes them."""

from __future__ import annotations

from pathlib import Path

from wirings import rules
from wirings.budgets.schedules import RAMP
from wirings.train import recipes
from wirings.train.tables import leaderboard
from wirings.train.tables import paper as tables
from wirings.train.tables.leaderboard import Leaderboard, Standing

ROOT = Path(__file__).parents[1]
WHEN = {
    "dnw": "to begin with: nothing to set or to remember, and any edge can still come in at the end",
    "decayed_gradient": "very few edges, whose wiring should settle: `dnw` first, a fixed wiring at last",
    "soft_threshold": 'few edges, and all fit at first: with a `schedule`, and `share="global"`, as its papers have it',
    "top_kast": "the gradient of all weights would not fit",
    "str": "a total is given, and layers should find out themselves how much of it is theirs",
    "gmp": "a pruning that everybody knows, and all edges fit at first",
    "l1_anneal": "the same, with weights drawn to zero before they go",
    "targeted_dropout": "one training, and the density may still be lowered afterwards",
    "set": "sparse from beginning to end, in memory and time, where no other gradient is to be had",
    "rigl": "the same, where the gradient of all edges can be had now and then",
    "sparse_momentum": "edges should move between layers; needs the momentum of all weights",
    "nm": "the network will run where n of every m weights are fast (2:4)",
    "fine_tune": "there is a trained network already",
    "lottery": "to study tickets: it trains twice",
    "random": "the baseline for all others: what learning a wiring is worth",
    "expander": "the same, with equally many edges for every node",
    "no_update": "an ablation: what the gradient to hallucinated edges is worth",
    "dense": "all edges: what is given up",
}
"""When to use a rule."""
HEADER = ("rule", "when to use it", "gradient", "edges at first", "remembers", "a step")
COLUMNS = ("Table 2's network", "ResNet, 10 %", "5 %", "2 %")
DENSE = {0: "table2/complete", 1: "resnet/dense", 2: "resnet/dense", 3: "resnet/dense"}
"""By the column: the same network with all its edges, which is no row of the leaderboard."""
NOTE = (
    "(Accuracy on CIFAR-10 in percent, mean ± standard deviation, in brackets the number of seeds, and the kind of "
    "row: cubic, a schedule leads from all edges to as many; global, all layers are ranked together; erk, the other "
    "way to share edges out; none of these is the plain one, which stands first where another one is better. –: not "
    "measured, or no row. "
    "Gradient: whether training needs that of all edges, of some, or of real ones alone. Edges at first: "
    "those that the first step uses, without a schedule, at a density of 10 %. Remembers: bytes an allowed edge. "
    "A step: its time over `dnw`'s on Table 2's network, measured side by side.)"
)


def choosing(folder: Path = ROOT / "results") -> str:
    """One row a rule: when, what it costs, what it reached."""
    assert set(WHEN) == set(rules.names()), "every rule has its words"
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
    """The row of a rule as it is: no schedule, equal shares for all layers, and nothing else of its own."""
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
    return f"{shown} ({len(row.seeds)}{variant})"


def _variant(one: Standing) -> str:
    """What tells a row from its rule's plain one: a schedule, how edges are shared out, or what its name adds to it."""
    settings = recipes.get(one.row.recipe).settings
    schedule, share = settings.rule.options.get("schedule"), settings.model.options.get("share", "uniform")
    name = one.row.recipe.partition("/")[2].removeprefix("mobilenet-").removeprefix("resnet-")
    rest = name.partition(one.rule)[2].split("-")[0].strip("_")
    parts = [] if schedule is None else [schedule.get("kind", RAMP["kind"])]
    parts += [share] if share != "uniform" else []
    parts += [rest] if rest not in ("", "k", *parts) else []  # k: as many edges from the beginning, which is plain
    return "".join(f", {part}" for part in parts)


def best(folder: Path = ROOT / "results") -> str:
    """On each network: `random`, `dnw`, the best rule of all with as many edges, and the network with all of them."""
    lines = ["| | `random` | `dnw` | the best rule | all edges |", "|---|---|---|---|---|"]
    for board, dense in zip(leaderboard.boards(folder), DENSE.values(), strict=True):
        plain = [_plain(_of(rule, board)) for rule in ("random", "dnw")]
        first = next((one for one in board.standings if one.row.mean is not None), None)
        cells = ["–" if one is None else _with_cost(one) for one in plain]
        cells += ["–" if first is None else f"`{first.rule}`: {_with_cost(first)}"]
        cells += [_cell(tables.row_of(recipes.get(dense), folder), "")]
        lines.append(f"| {board.title.partition(';')[0]} | {' | '.join(cells)} |")
    note = (
        "(Accuracy on CIFAR-10 in percent, number of seeds; multiply-adds of one image. Cubic: a schedule leads from "
        "all edges to as many. Global: all layers are ranked together, which puts more edges where maps are large.)"
    )
    return "\n".join([*lines, "", note])


def _with_cost(one: Standing) -> str:
    cost = "" if one.row.mult_adds is None else f", {one.row.mult_adds / 1e6:.1f}M"
    return f"{_cell(one.row, _variant(one))}{cost}"


def ste(folder: Path = ROOT / "results") -> str:
    """The leaderboard."""
    return leaderboard.markdown(leaderboard.boards(folder)).replace(f"{ROOT}/", "../").rstrip()
