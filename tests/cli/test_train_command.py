"""The command line: train, eval, predict, recipes, table."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
    monkeypatch.setenv("COLUMNS", "300")  # no line broken


def call(*arguments: Any) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def train(*arguments: Any, settings: list[str] = TINY) -> str:
    changes = [text for change in settings for text in ("--set", change)]
    return call("train", RECIPE, "--device", "cpu", *changes, *arguments)


def test_train_eval_and_predict_on_digits(tmp_path: Path) -> None:
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


def test_a_run_on_folders_of_images_names_its_classes(tmp_path: Path) -> None:
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
    with pytest.raises(WiringError, match="data set 'imagenet' cannot be downloaded, only cifar10 can"):
        call("data", "imagenet")
    with pytest.raises(WiringError, match=r"unknown data set 'cifar'\. Did you mean 'cifar10'"):
        call("data", "cifar")


def test_images_that_the_network_cannot_take(tmp_path: Path) -> None:
    message = r"model 'digits_static' cannot take the images of data set 'synthetic', which are 3 × 32 × 32"
    with pytest.raises(WiringError, match=message):
        train("--out", "run", settings=["epochs=1", "data.name=synthetic"])
    assert not (tmp_path / "run").exists()


def test_several_seeds_a_results_folder_and_overwriting(tmp_path: Path) -> None:
    train("--seed", 3, "--seed", 4, "--results", "kept")
    for seed in (3, 4):
        run = tmp_path / "runs" / RECIPE / f"seed{seed}" / "result.json"
        kept = tmp_path / "kept" / RECIPE / f"seed{seed}.json"
        assert results.read(run) == results.read(kept)
        assert results.read(kept).seed == seed
    assert [result.seed for result in results.find(tmp_path / "kept", RECIPE)] == [3, 4]
    with pytest.raises(WiringError, match=r"seed4\.json holds a result already: give --overwrite"):
        train("--seed", 4, "--results", "kept", "--out", "again")
    assert not (tmp_path / "again").exists(), "it says so before it trains"
    before = (tmp_path / "kept" / RECIPE / "seed4.json").read_text()
    assert "wrote kept" in train("--seed", 4, "--results", "kept", "--overwrite", "--out", "again")
    assert (tmp_path / "kept" / RECIPE / "seed4.json").read_text() != before
    with pytest.raises(WiringError, match="--out names the folder of one run"):
        train("--seed", 1, "--seed", 2, "--out", "two")


def test_the_seed_is_a_setting_too(tmp_path: Path) -> None:
    train("--set", "seed=5")
    assert results.read(tmp_path / "runs" / RECIPE / "seed5" / "result.json").seed == 5


@pytest.mark.parametrize("minutes", ["nan", "-1"])
def test_time_limits_that_are_none(minutes: str) -> None:
    with pytest.raises(WiringError, match=f"--max-minutes must be a number of minutes, not {minutes}"):
        train("--out", "run", "--max-minutes", minutes)


def test_a_folder_that_holds_a_run_and_a_time_limit(tmp_path: Path) -> None:
    said = train("--out", "run", "--max-minutes", 0)
    assert "The time is up. Continue run with --resume, at epoch 1, batch 2." in said
    assert not (tmp_path / "run" / "result.json").exists()
    with pytest.raises(WiringError, match=r"already holds a run\. Continue it with --resume, or give another --out"):
        train("--out", "run")
    said = train("--out", "run", "--resume")
    assert "Resuming at epoch 1, batch 2." in said
    assert results.read(tmp_path / "run" / "result.json").steps == 6


def test_misspelt_names_are_mended() -> None:
    with pytest.raises(WiringError, match=r"Did you mean 'optimizer\.momentum'"):
        train("--set", "optimizer.momentun=0.2")
    with pytest.raises(WiringError, match="Did you mean 'digits/static-dnw'"):
        call("train", "digits/static-dnv")
    with pytest.raises(WiringError, match="epochs"):
        train("--set", "epochs=x")
    with pytest.raises(WiringError, match="not the folder of a run"):
        call("eval", "nothing")
    assert not Path("runs").exists()


def test_a_recipe_of_your_own(tmp_path: Path) -> None:
    Path("mine.yaml").write_text(f"base: {RECIPE}\nepochs: 1\n")
    changes = [text for change in TINY[1:] for text in ("--set", change)]
    call("train", "mine.yaml", "--device", "cpu", *changes)
    assert results.read(tmp_path / "runs" / "mine" / "seed0" / "result.json").epochs == 1


def test_two_phases_in_one_command(tmp_path: Path) -> None:
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
    with pytest.raises(WiringError, match="--start names the folder of one run"):
        ticket("--seed", 1, "--seed", 2, "--start", "runs/complete/seed1")
    with pytest.raises(WiringError, match="static-dnw starts from a new network"):
        train("--start", "runs/complete/seed1")
    said = ticket("--seed", 3, "--max-minutes", 0)
    assert "The time is up. Continue runs/complete/seed3 with --resume, at epoch 1, batch 2." in said
    assert not (tmp_path / "runs" / "ticket" / "seed3").exists()
    ticket("--seed", 3, "--resume")
    assert results.read(tmp_path / "runs" / "ticket" / "seed3" / "result.json").steps == 6


def test_tensorboard_is_written_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    train("--out", "without")
    assert not (tmp_path / "without" / "tensorboard").exists()
    train("--out", "with", "--tensorboard")
    assert list((tmp_path / "with" / "tensorboard").glob("events.*"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(WiringError, match="pip install tensorboard"):
        train("--out", "another", "--tensorboard")


def test_recipes_and_an_empty_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")  # in a pipe nothing is cut off
    listed = call("recipes")
    assert all(name in listed for name in recipes.names())
    assert "80.9 ± 0.6 %" in listed
    shown = call("table", 1, "--results", "none")
    assert "80.9" in shown
    assert "|" in call("table", 1, "--results", "none", "--markdown")
    assert "89.7 ± 0.2 %" in call("table", 2, "--results", "none")
    assert "87.7 ± 0.3 %" in call("table", "appendix_b", "--results", "none")
    with pytest.raises(WiringError, match="unknown table 'table9'"):
        call("table", 9)
