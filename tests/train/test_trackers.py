"""TensorBoard and Weights & Biases, here a fake that keeps what it is sent, get the same curves and pictures."""

import csv
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from breaking import BreakError
from commands import call
from matplotlib.figure import Figure

import wirings
from wirings import WiringError, draw
from wirings.train import phases, recipes
from wirings.train.run.log import ConsoleLog
from wirings.train.settings import with_overrides

RECIPE = "digits/static-dnw"
TINY = ["data.name=synthetic", "data.options={shape: [1, 8, 8], examples: 50, test_examples: 40}", "batch=20"]


class FakeRun:
    """A run of the fake."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments, self.id = arguments, arguments["id"] or "abc123"
        self.lines: list[dict[str, Any]] = []
        self.metrics: list[tuple[str, dict[str, Any]]] = []
        self.finished = False

    def define_metric(self, name: str, **options: Any) -> None:
        self.metrics.append((name, options))

    def log(self, values: dict[str, Any]) -> None:
        assert not self.finished
        self.lines.append(values)

    def finish(self) -> None:
        self.finished = True


class FakeImage:
    """What the fake turns figures into."""

    def __init__(self, figure: Figure) -> None:
        assert isinstance(figure, Figure)


class FakeWandb(ModuleType):
    """The part of the package that is used."""

    Image = FakeImage

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.runs: list[FakeRun] = []

    def init(self, **arguments: Any) -> FakeRun:
        self.runs.append(FakeRun(arguments))
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def train(out: Path, *changes: str, log: ConsoleLog, **more: Any) -> None:
    settings, overrides = with_overrides(recipes.get(RECIPE).settings, [*TINY, *changes])
    phases.train(RECIPE, settings, out, device="cpu", overrides=overrides, log=log, **more)


def test_both_get_the_same_curves_and_pictures(wandb: FakeWandb, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, "epochs=3", "history_every=1", log=ConsoleLog(tensorboard=True, wandb="wires"))
    (run,) = wandb.runs
    assert run.arguments["project"] == "wires"
    assert run.arguments["name"] == f"{RECIPE}, seed 0"
    assert run.arguments["dir"] == str(tmp_path)
    assert run.arguments["config"]["recipe"] == RECIPE
    assert run.arguments["config"]["optimizer"]["lr"] == recipes.get(RECIPE).settings.optimizer.lr
    assert ("*", {"step_metric": "epoch"}) in run.metrics
    assert [line["epoch"] for line in run.lines] == [1, 2, 3]
    assert run.finished

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = events.Tags()
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert {"accuracy", "loss", "train_loss", "swapped", "lr"} <= set(tags["scalars"])
    for name in tags["scalars"]:
        assert [event.value for event in events.Scalars(name)] == pytest.approx([line[name] for line in run.lines])
        assert [line[name] for line in run.lines] == pytest.approx([float(row[name]) for row in rows])
    pictures = {name for line in run.lines for name, value in line.items() if isinstance(value, FakeImage)}
    assert pictures == set(tags["images"]) >= {"wiring/blocks", "wiring/births-and-deaths-edges"}
    assert set(run.lines[0]) - {"epoch"} - pictures == set(tags["scalars"])


def test_a_resumed_run_is_continued(wandb: FakeWandb, tmp_path: Path) -> None:
    train(tmp_path, "epochs=2", log=ConsoleLog(wandb="wires"), max_minutes=0.0)
    wandb.runs[0].id = "other"
    train(tmp_path, "epochs=2", log=ConsoleLog(wandb="wires"), resume=True)
    first, second = wandb.runs
    assert (first.arguments["id"], second.arguments["id"]) == (None, "abc123")
    assert first.arguments["resume"] == second.arguments["resume"] == "allow"
    assert [line["epoch"] for line in (*first.lines, *second.lines)] == [1, 2]


def test_runs_are_closed_if_training_fails(wandb: FakeWandb, tmp_path: Path) -> None:
    class Broken(ConsoleLog):
        def batch(self, done: int) -> None:
            raise BreakError

    with pytest.raises(BreakError):
        train(tmp_path, "epochs=1", log=Broken(wandb="wires"))
    assert wandb.runs[0].finished


def test_nothing_is_trained_if_weights_and_biases_cannot_be_reached(
    wandb: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**arguments: Any) -> None:
        raise RuntimeError("api_key not configured\x1b[2J")

    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(WiringError, match=r"could not be started \(api_key not configured\\x1b.*WANDB_MODE=offline"):
        train(tmp_path / "run", "epochs=1", log=ConsoleLog(wandb="wires"))
    assert not (tmp_path / "run" / "log.csv").exists()
    train(tmp_path / "run", "epochs=1", log=ConsoleLog())  # the folder can still be used


def test_the_option_of_the_command(wandb: FakeWandb, tmp_path: Path) -> None:
    changes = [text for change in (*TINY, "epochs=1") for text in ("--set", change)]
    call("train", RECIPE, "--device", "cpu", "--out", tmp_path / "run", "--wandb", "wires", *changes)
    assert wandb.runs[0].arguments["project"] == "wires"


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(WiringError, match="Weights & Biases needs the package wandb: pip install wandb"):
        ConsoleLog(wandb="wires")


def test_figures_of_a_model_and_of_a_history() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 4))
    wiring = wirings.wire_(model, "dnw", density=0.5)
    found = draw.figures(model, title="$x$")
    assert {"adjacency", "blocks", "density", "layers"} <= set(found)
    assert all(isinstance(figure, Figure) for figure in found.values())
    recorder = wirings.Recorder(wiring, every=1)
    with torch.no_grad():
        model[0].weight.neg_()
    recorder.step(loss=1.0)
    assert "births-and-deaths-edges" in draw.figures(recorder.history())
