"""The command line: train, eval, predict, recipes, table."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
from commands import call
from rich.console import Console
from typer.main import get_command as click_command
from typer.testing import CliRunner

from wirings import WiringError
from wirings.cli.app import app
from wirings.train import recipes, results
from wirings.train.data import CIFAR10
from wirings.train.data.digits import load

RECIPE = "digits/static-dnw"
TINY = ["epochs=2", "data.name=synthetic", "batch=20"]
TINY += ["data.options={shape: [1, 8, 8], examples: 50, test_examples: 40}"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")  # no wrapped lines


def train(*arguments: Any, settings: list[str] = TINY) -> str:
    changes = [text for change in settings for text in ("--set", change)]
    return call("train", RECIPE, "--device", "cpu", *changes, *arguments)


def test_trains_evaluates_and_predicts_on_digits(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    said = train("--out", "run", settings=["epochs=2", "batch=200"])
    result = results.read(tmp_path / "run" / "result.json")
    assert "epoch   1/2: loss " in said
    assert "edges swapped per step" in said
    assert "images/s" in said
    assert f"{RECIPE}, seed 0: {result.accuracy:.2f} % after" in said
    assert result.overrides == {"epochs": 2, "batch": 200}
    again = call("eval", "run", "--device", "cpu")
    assert again.startswith(f"run: {result.accuracy:.2f} % (top 5 {result.top5:.2f} %), loss {result.test_loss:.4f}")
    assert call("eval", "run", "--best").startswith(f"run: {result.best_accuracy:.2f} %")
    pixels = (load()[0][0, 0].numpy() * 255).round().astype(np.uint8)
    image.fromarray(pixels).resize((32, 32), image.Resampling.NEAREST).save("digit.png")
    image.fromarray(pixels).save("small.png")
    first, second = call("predict", "run", "digit.png", "small.png").splitlines()
    guesses = first.removeprefix("digit.png: ").split(", ")
    assert len(guesses) == 3
    assert all(guess.split()[0] in set("0123456789") for guess in guesses)
    assert second.removeprefix("small.png: ") == first.removeprefix("digit.png: ")
    with pytest.raises(WiringError, match=r"there is no image none\.png"):
        call("predict", "run", "none.png")


def test_predictions_name_the_classes_of_an_image_folder(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "val"):
        for name, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            image.new("RGB", (16, 16), colour).save(tmp_path / "images" / part / name / "one.png")
    data = ["data.name=folder", "data.image_size=16", "data.workers=0", "data.directory=images"]
    changes = ["model.name=tiny_static", "model.options={}", "epochs=1", "batch=2", *data]
    train("--out", "run", settings=changes)
    said = call("predict", "run", "images/val/red/one.png")
    assert sorted(guess.split()[0] for guess in said.partition(": ")[2].split(", ")) == ["blue", "red"]


def test_data_prepares_what_can_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CIFAR10, "fetch", lambda _, directory: tmp_path / f"from {directory}")
    assert call("data", "cifar10").strip() == f"ready: {tmp_path / 'from None'}"
    with pytest.raises(
        WiringError, match="data set 'imagenet' cannot be downloaded, only cifar10, cifar100, shakespeare can"
    ):
        call("data", "imagenet")
    with pytest.raises(
        WiringError, match=r"data set 'text' needs no preparation\. Give the folder to wirings train: --data"
    ):
        call("data", "text", "--data", tmp_path)
    with pytest.raises(WiringError, match=r"unknown data set 'cifar'\. Did you mean 'cifar10'"):
        call("data", "cifar")


def test_rejects_images_that_do_not_fit_the_network(tmp_path: Path) -> None:
    message = r"model 'digits_static' cannot take the images of data set 'synthetic', which are 3 × 32 × 32"
    with pytest.raises(WiringError, match=message):
        train("--out", "run", settings=["epochs=1", "data.name=synthetic"])
    assert not (tmp_path / "run").exists()


def test_rejects_text_that_does_not_fit_the_network(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 100)
    changes = ["data.name=text", "data.directory=text.txt", "data.options.context=8", "epochs=1"]
    with pytest.raises(WiringError, match=r"should be the same\. Fix model\.options or data\.options\."):
        train("--out", "run", settings=changes)


@pytest.mark.parametrize("classes", [1, 9])
def test_rejects_fewer_scores_than_classes(classes: int, tmp_path: Path) -> None:
    message = rf"must return a score for each of 10 classes .* got \(1, {classes}\)\. Fix model\.options"
    with pytest.raises(WiringError, match=message):
        train("--out", "run", settings=["epochs=1", f"model.options.classes={classes}"])
    assert not (tmp_path / "run").exists()


def test_trains_several_seeds_and_keeps_results(tmp_path: Path) -> None:
    train("--seed", 3, "--seed", 4, "--results", "kept")
    for seed in (3, 4):
        run = tmp_path / "runs" / RECIPE / f"seed{seed}" / "result.json"
        kept = tmp_path / "kept" / RECIPE / f"seed{seed}.json"
        assert results.read(run) == results.read(kept)
        assert results.read(kept).seed == seed
    assert [result.seed for result in results.find(tmp_path / "kept", RECIPE)] == [3, 4]
    with pytest.raises(WiringError, match=r"seed4\.json holds a result already\. Give --overwrite"):
        train("--seed", 4, "--results", "kept", "--out", "again")
    assert not (tmp_path / "again").exists(), "before it trains"
    before = (tmp_path / "kept" / RECIPE / "seed4.json").read_text()
    assert "wrote kept" in train("--seed", 4, "--results", "kept", "--overwrite", "--out", "again")
    assert (tmp_path / "kept" / RECIPE / "seed4.json").read_text() != before
    with pytest.raises(WiringError, match="--out is the folder of one run, got 2 seeds"):
        train("--seed", 1, "--seed", 2, "--out", "two")


def test_the_seed_can_be_set_as_a_setting(tmp_path: Path) -> None:
    train("--set", "seed=5")
    assert results.read(tmp_path / "runs" / RECIPE / "seed5" / "result.json").seed == 5


@pytest.mark.parametrize("minutes", ["nan", "-1"])
def test_rejects_invalid_time_limits(minutes: str) -> None:
    with pytest.raises(WiringError, match=f"--max-minutes must be 0 or more, got {minutes}"):
        train("--out", "run", "--max-minutes", minutes)


def test_stops_at_a_time_limit_and_resumes(tmp_path: Path) -> None:
    said = train("--out", "run", "--max-minutes", 0)
    assert "The time is up. Continue run with --resume, at epoch 1, batch 2." in said
    assert not (tmp_path / "run" / "result.json").exists()
    with pytest.raises(WiringError, match=r"already holds a run\. Continue it with --resume, or give another --out"):
        train("--out", "run")
    said = train("--out", "run", "--resume")
    assert "Resuming at epoch 1, batch 2." in said
    assert results.read(tmp_path / "run" / "result.json").steps == 6


def test_suggests_the_nearest_name() -> None:
    with pytest.raises(WiringError, match=r"Did you mean 'optimizer\.momentum'"):
        train("--set", "optimizer.momentun=0.2")
    with pytest.raises(WiringError, match="Did you mean 'digits/static-dnw'"):
        call("train", "digits/static-dnv")
    with pytest.raises(WiringError, match="epochs"):
        train("--set", "epochs=x")
    with pytest.raises(WiringError, match="not the folder of a run"):
        call("eval", "nothing")
    assert not Path("runs").exists()


def test_trains_a_users_own_recipe(tmp_path: Path) -> None:
    Path("mine.yaml").write_text(f"base: {RECIPE}\nepochs: 1\n")
    changes = [text for change in TINY[1:] for text in ("--set", change)]
    call("train", "mine.yaml", "--device", "cpu", *changes)
    assert results.read(tmp_path / "runs" / "mine" / "seed0" / "result.json").epochs == 1


def test_trains_two_phases_in_one_command(tmp_path: Path) -> None:
    Path("complete.yaml").write_text(f"base: {RECIPE}\nrule: {{name: dense}}\n")
    Path("ticket.yaml").write_text(
        f"base: {RECIPE}\nrule: {{name: lottery}}\nstart: {{recipe: complete.yaml, weights: initial}}\n"
    )
    changes = [text for change in TINY for text in ("--set", change)]

    def ticket(*arguments: Any) -> str:
        return call("train", "ticket.yaml", "--device", "cpu", *changes, *arguments)

    said = ticket("--seed", 1)
    assert "ticket starts from the network of complete, which is trained first, in runs/complete/seed1" in said
    assert "Starting from runs/complete/seed1, initial weights." in said
    assert said.count("epoch   2/2") == 2
    result = results.read(tmp_path / "runs" / "ticket" / "seed1" / "result.json")
    assert (result.recipe, result.edges) == ("ticket", 200)
    before = (tmp_path / "runs" / "complete" / "seed1" / "last.safetensors").read_bytes()
    said = ticket("--seed", 1, "--out", "again", "--start", "runs/complete/seed1", "--results", "kept")
    assert said.count("epoch   2/2") == 1
    assert (tmp_path / "runs" / "complete" / "seed1" / "last.safetensors").read_bytes() == before
    assert results.read(tmp_path / "kept" / "ticket" / "seed1.json").accuracy == result.accuracy
    with pytest.raises(WiringError, match="none is not the folder of a run to start from"):
        ticket("--seed", 2, "--start", "none")
    with pytest.raises(WiringError, match="--start is the folder of one run, got 2 seeds"):
        ticket("--seed", 1, "--seed", 2, "--start", "runs/complete/seed1")
    with pytest.raises(WiringError, match="static-dnw starts from a new network"):
        train("--start", "runs/complete/seed1")
    said = ticket("--seed", 3, "--max-minutes", 0)
    assert "The time is up. Continue runs/complete/seed3 with --resume, at epoch 1, batch 2." in said
    assert not (tmp_path / "runs" / "ticket" / "seed3").exists()
    ticket("--seed", 3, "--resume")
    assert results.read(tmp_path / "runs" / "ticket" / "seed3" / "result.json").steps == 6


def test_writes_tensorboard_files_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    train("--out", "without")
    assert not (tmp_path / "without" / "tensorboard").exists()
    train("--out", "with", "--tensorboard")
    assert list((tmp_path / "with" / "tensorboard").glob("events.*"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(WiringError, match="pip install tensorboard"):
        train("--out", "another", "--tensorboard")


def test_lists_recipes_and_prints_tables_without_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")  # nothing is cut off in a pipe
    listed = call("recipes")
    assert all(name in listed for name in recipes.names())
    assert "80.9 ± 0.6 %" in listed
    shown = call("table", 1, "--results", "none")
    assert "80.9" in shown
    assert "|" in call("table", 1, "--results", "none", "--markdown")
    assert "89.7 ± 0.2 %" in call("table", 2, "--results", "none")
    assert "87.7 ± 0.3 %" in call("table", "appendix_b", "--results", "none")
    Path("empty").mkdir()
    rows = json.loads(call("table", 1, "--results", "empty", "--json"))
    assert [(row["recipe"], row["paper"]) for row in rows][1] == ("table1/static-dnw", 80.9)
    assert json.loads(call("table", "ste", "--results", "empty", "--json"))[0]["standings"][0]["row"]["mean"] is None
    with pytest.raises(WiringError, match="--json and --markdown exclude each other"):
        call("table", 1, "--json", "--markdown")
    with pytest.raises(WiringError, match="unknown table 'table9'"):
        call("table", 9)


def test_seeds_are_written_as_for_sweeps(tmp_path: Path) -> None:
    train("--seed", "0-1,4")
    assert sorted(path.name for path in (tmp_path / "runs" / RECIPE).iterdir()) == ["seed0", "seed1", "seed4"]
    for seeds, message in [("x", "--seed expects numbers"), ("3-1", "empty range"), ("1,1", "--seed 1 is given twice")]:
        with pytest.raises(WiringError, match=message):
            train("--seed", seeds)


def test_an_interrupt_says_how_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("wirings.train.phases.train", interrupt)
    for saved, said in [
        (False, "Interrupted before the first checkpoint. To start over, repeat the command."),
        (True, "Interrupted. To continue from the last checkpoint, repeat the command with --resume."),
    ]:
        if saved:
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "last.safetensors").touch()
        result = CliRunner().invoke(app, ["train", RECIPE, "--out", "run"])
        assert result.exit_code == 130
        assert result.output.strip() == said


@pytest.mark.parametrize("out", ["o[/v2]", "o[bold]"])
def test_paths_with_markup_are_printed_as_they_are(out: str) -> None:
    assert f"see {out}" in train("--out", out)
    assert call("eval", out, "--device", "cpu").startswith(f"{out}: ")


def test_control_characters_in_names_are_escaped(tmp_path: Path) -> None:
    name = "run\x1b[2J\nnext"
    said = train("--out", name)
    assert "\x1b[2J" not in said
    assert r"see run\x1b[2J" in said


HOSTILE = "a\x1b[31m[red]<img src=x>|`*_\u202e\x07"


@pytest.mark.slow
def test_names_from_outside_are_text_in_every_command(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for folder in (f"images/{part}/{name}" for part in ("train", "val") for name in (HOSTILE, f"{HOSTILE}2")):
        (tmp_path / folder).mkdir(parents=True)
        image.new("RGB", (16, 16)).save(tmp_path / folder / "one.png")
    image.new("RGB", (16, 16)).save(tmp_path / f"{HOSTILE}.png")
    data = ["data.name=folder", "data.image_size=16", "data.workers=0", "data.directory=images"]
    said = [
        train("--out", HOSTILE, settings=["model.name=tiny_static", "model.options={}", "epochs=1", "batch=2", *data]),
        call("eval", HOSTILE, "--device", "cpu"),
        call("predict", HOSTILE, f"{HOSTILE}.png"),
        call("predict", HOSTILE, f"{HOSTILE}.png", "--json"),
        call("show", HOSTILE),
        call("show", HOSTILE, "--html"),
        call("profile", HOSTILE),
        call("compact", HOSTILE, "-o", f"{HOSTILE}.safetensors"),
        call("ship", HOSTILE, "--out", "shipped", "--quick", "--examples", "2"),
    ]
    assert r"\x1b[31m[red]<img src=x>" in said[2]
    said += [(tmp_path / name).read_text(encoding="utf-8") for name in (f"{HOSTILE}/history.html", "shipped/report.md")]
    for name in ("eval", "show", "predict", "profile", "ship", "generate", "bleu", "recipes", "table", "data"):
        with pytest.raises(WiringError) as caught:
            call(name, f"no {HOSTILE}", *(["x.png"] if name == "predict" else []))
        said.append(str(caught.value))
    for text in said:
        assert all(c.isprintable() or c in "\n\t" for c in text), ascii(text)
    assert not any("<img" in text for text in said[9:11])  # the page and the report


def test_output_as_json(tmp_path: Path) -> None:
    train("--out", "run")
    result = results.read(tmp_path / "run" / "result.json")
    shown = json.loads(call("eval", "run", "--device", "cpu", "--json"))
    assert shown == {"run": "run", "accuracy": result.accuracy, "top5": result.top5, "loss": shown["loss"]}
    listed = json.loads(call("recipes", "table1", "--json"))
    assert [one["name"] for one in listed] == [recipe.name for recipe in recipes.table(1)]
    assert listed[0]["paper"] == {"accuracy": 76.1, "std": 0.5}
    assert listed[0]["settings"]["model"]["name"] == "tiny_static"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["table1"], {name for name in recipes.names() if name.startswith("table1/")}),
        (["1"], {name for name in recipes.names() if name.startswith("table1/")}),
        (["*-dnw"], {name for name in recipes.names() if name.endswith("-dnw")}),
        (["table1/static-dnw"], {"table1/static-dnw"}),
        (["digits", "table2/dnw"], {"digits/static-dnw", "digits/static-random", "table2/dnw"}),
        (["--rule", "lottery"], {"table2/lottery"}),
        (["--model", "xception"], {"table3/xception-0.5", "table3/xception-1"}),
        (["digits", "--dataset", "cifar10"], set()),
    ],
)
def test_filters_recipes(arguments: list[str], expected: set[str]) -> None:
    assert {one["name"] for one in json.loads(call("recipes", *arguments, "--json"))} == expected
    listed = call("recipes", *arguments).splitlines()[1:]
    assert {line.split()[0] for line in listed if "/" in line.split(" ")[0]} == expected


def test_rejects_filters_that_match_nothing() -> None:
    for arguments, message in [
        (["tabel2"], "unknown recipe or table 'tabel2'. Did you mean 'table2'"),
        (["*dnv*"], r"no recipe matches '\*dnv\*'"),
        (["--rule", "dwn"], "unknown rule 'dwn'. Did you mean 'dnw'"),
        (["--dataset", "cifar"], "unknown data set 'cifar'. Did you mean 'cifar10'"),
    ]:
        with pytest.raises(WiringError, match=message):
            call("recipes", *arguments)


def test_the_list_of_recipes_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr("wirings.cli.recipes.open_console", lambda: Console(file=file, width=80))
    call("recipes")
    lines = file.getvalue().splitlines()
    assert len(lines) == 1 + len(recipes.names()), "one line each"
    assert {line.split()[0] for line in lines[1:]} == set(recipes.names())
    assert max(map(len, lines)) <= 80


def test_a_single_recipe_is_shown_with_its_note_and_settings() -> None:
    said = call("recipes", "table2/targeted_dropout-0.95")
    assert "Unconstrained, which is the better variant" in said
    assert "rho: 0.95" in said


def test_every_command_names_things_alike() -> None:
    commands = {command.name or command.callback.__name__: command for command in app.registered_commands}
    options: dict[str, set[str]] = {}
    for name in commands:
        shown = click_command(app).commands[name]
        for parameter in shown.params:
            assert getattr(parameter, "help", None), f"{name}: {parameter.name} has no help text"
            for option in parameter.opts:
                options.setdefault(option, set()).add(name)
        assert shown.help.endswith(".")
    assert options["--out"] == options["-o"] == {"demo", "train", "sweep", "tune", "compact", "ship", "show"}
    assert options["--data"] == {"train", "sweep", "tune", "eval", "ship", "data"}
    assert options["--device"] == {"train", "sweep", "tune", "eval", "predict", "generate"}
    assert "--directory" not in options


@pytest.mark.parametrize(
    "arguments",
    [["train", RECIPE, "--out", f"new/{'x' * 300}"], ["eval", "x" * 300], ["profile", "x" * 5000], ["show", "a\0b"]],
)
def test_rejects_paths_that_no_file_can_have(arguments: list[str]) -> None:
    with pytest.raises(WiringError, match=r"the path .* cannot be used: "):
        call(*arguments)


def test_rejects_devices_that_do_not_exist() -> None:
    for device in ("gpu", "cuda:x", "cuda:4096", "cpu:0"):
        with pytest.raises(WiringError, match=r"--device (must be cuda or cpu|is cuda:4096, but PyTorch finds)"):
            call("eval", "table1/static-dnw", "--device", device)


@pytest.mark.parametrize("value", ["seed=!!timestamp z", "rule.options.rule=1", "data.options.batch=1", "seed=&a [*a]"])
def test_rejects_malformed_settings(value: str) -> None:
    with pytest.raises(WiringError):
        train("--set", value)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not limit the size of files")
@pytest.mark.parametrize("limit", [0, 2_000, 20_000])
def test_limited_file_sizes_end_training_with_a_sentence(limit: int, tmp_path: Path) -> None:
    """As on a full disk: one message, exit status 1, and no part of a file."""
    output = tmp_path / "output.txt"
    words = ["train", RECIPE, "--device", "cpu", "--out", "run"]
    words += [text for change in TINY for text in ("--set", change)]
    process = processes.start(limited_command, limit, *words, output=output)
    assert processes.wait(process) == 1, output.read_text()
    said = (tmp_path / "errors.txt").read_text()
    assert re.search(r"^Error: \S+ could not be written: the file would be larger than the system allows", said), said
    assert said.count("\n") == 1
    assert not [path for path in (tmp_path / "run").glob(".*") if path.is_file()], "a part of a file"
    process = processes.start(processes.command, *words, "--resume", output=output)
    assert processes.wait(process) == 0, output.read_text()


def limited_command(limit: int, *words: str) -> None:
    """Run the command line with a limit on the size of files, except for what it prints."""
    import resource

    errors, sys.stderr = sys.stderr, io.StringIO()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        processes.command(*words)
    except SystemExit as ended:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        Path("errors.txt").write_text(f"{ended.code}\n")
        sys.stderr = errors
        raise


@pytest.mark.parametrize(
    "words",
    [
        ("compact", "table1/static-dnw", "--image-size", "9" * 50),
        ("profile", "digits/static-dnw", "--classes", "9" * 50),
        ("profile", "digits/static-dnw", "--classes", "0"),
        ("eval", "table1/static-dnw", "--device", "9" * 5000),
    ],
)
def test_numbers_of_any_size_are_refused_in_a_sentence(words: tuple[str, ...]) -> None:
    with pytest.raises(WiringError, match="must be") as refused:
        call(*words)
    assert len(str(refused.value)) < 300
