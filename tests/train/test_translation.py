"""Training runs that translate: BLEU, translations in the folder, resuming, and scoring later."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from breaking import BreakError, Stops, lines, same_runs
from commands import call
from typer.testing import CliRunner

from wirings import WiringError
from wirings.cli.app import app
from wirings.train import data, recipes, results
from wirings.train import saved_runs as runs
from wirings.train.generate import generate
from wirings.train.run import loop
from wirings.train.settings import Settings, with_overrides
from wirings.train.translations import score_translations

RECIPE = "translate/dnw-10"
SMALL = ["data.options.vocabulary=300", "data.options.lengths=[12,24]", "data.options.beams=2", "batch=4", "steps=14"]
SMALL += ["model.options={layers: 1, width: 16, heads: 2, hidden: 32, density: 0.5, dropout: 0.1}", "precision=fp32"]
SMALL += ["schedule.warmup_steps=2", "fast=false", "evaluate_every=2", "optimizer.lr=1e-2"]

Small = Callable[..., Settings]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Small:
    """Settings of a short run on a few pairs; an epoch has three steps."""
    monkeypatch.setenv("WIRINGS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "pairs"
    folder.mkdir()
    data.get("multi30k").write_sample(folder)

    def settings(*changes: str, recipe: str = RECIPE) -> Settings:
        return with_overrides(recipes.get(recipe).settings, [f"data.directory={folder}", *SMALL, *changes])[0]

    return settings


def test_a_run_is_measured_by_bleu_and_keeps_its_translations(small: Small, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = loop.train(RECIPE, small(), out, device="cpu")
    assert result is not None
    assert (result.metric, result.higher_is_better, result.steps, result.epochs) == ("bleu", True, 14, 5)
    log = lines(out)
    assert [line["bleu"] != "" for line in log] == [False, True, False, True, True]
    assert float(log[-1]["bleu"]) == result.value == result.score
    assert str(result) == f"{result.value:.2f} BLEU"
    assert (out / "references.txt").read_text().split("\n")[0] == "Der Hund rennt."
    again = runs.measure_by(out, device="cpu")
    assert (again.value, again.loss) == (result.value, result.test_loss)
    assert again.files["translations.txt"] == (out / "translations.txt").read_text()
    assert score_translations(out) == result
    shown = CliRunner().invoke(app, ["eval", str(out), "--device", "cpu"])
    assert f"{result.value:.2f} BLEU, next token" in shown.output
    instead = r"\. Use `wirings eval`; the run's translations are in its translations\.txt\."
    with pytest.raises(WiringError, match=f"was trained to translate, not to continue a text{instead}"):
        generate(out, "A dog", device="cpu")
    with pytest.raises(WiringError, match=f"was trained to translate, not on images{instead}"):
        list(runs.predict(out, [], device="cpu"))
    compacted = CliRunner().invoke(app, ["compact", str(out), "--out", str(tmp_path / "small.pt2")])
    assert "largest difference of the outputs" in compacted.output
    assert (tmp_path / "small.pt2").exists()
    shipped = CliRunner().invoke(app, ["ship", str(out), "--quick"])
    assert "The network was not measured on data: BLEU needs a model that translates word by word" in shipped.output


def test_resumes_bit_for_bit(small: Small, tmp_path: Path) -> None:
    settings = small("checkpoint_every=5", "history_every=1")
    loop.train(RECIPE, settings, tmp_path / "whole", device="cpu")
    for after in (4, 5, 6):
        with pytest.raises(BreakError):
            loop.train(RECIPE, settings, tmp_path / "broken", device="cpu", resume=True, log=Stops(after))
    loop.train(RECIPE, settings, tmp_path / "broken", device="cpu", resume=True)
    same_runs(tmp_path / "whole", tmp_path / "broken")
    assert (tmp_path / "whole/translations.txt").read_text() == (tmp_path / "broken/translations.txt").read_text()


def test_accumulated_parts_give_the_same_gradient(small: Small, tmp_path: Path) -> None:
    still = ["model.options.dropout=0", "model.options.attention_dropout=0", "evaluate_every=99"]
    one, other = (
        loop.train(RECIPE, small(*still, f"accumulate={parts}"), tmp_path / str(parts), device="cpu")
        for parts in (1, 2)
    )
    assert one is not None
    assert other is not None
    assert one.test_loss == pytest.approx(other.test_loss, rel=1e-4)


def test_a_run_without_sacrebleu_is_scored_later(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, kept = tmp_path / "run", tmp_path / "results"
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "sacrebleu", None)
        with pytest.raises(WiringError, match="BLEU needs the package sacrebleu"):
            loop.train(RECIPE, small(), out, device="cpu")
        assert not out.exists() or not any(path.suffix == ".safetensors" for path in out.iterdir())
        overrides = {"data.options.bleu": False}
        result = loop.train(RECIPE, small("data.options.bleu=false"), out, device="cpu", overrides=overrides)
        assert result is not None
        assert (result.metric, result.value) == ("nats", result.test_loss)
        with pytest.raises(WiringError, match="BLEU needs the package sacrebleu"):
            score_translations(out)
    whole = loop.train(RECIPE, small(), tmp_path / "whole", device="cpu")
    assert whole is not None
    done = CliRunner().invoke(app, ["bleu", str(out), "--results", str(kept)])
    assert done.exit_code == 0
    assert f"{whole.value:.2f} BLEU" in done.output
    scored = results.read(out / "result.json")
    assert (scored.metric, scored.value, scored.overrides) == ("bleu", whole.value, {})
    assert scored.settings == whole.settings
    [found] = results.find(kept, RECIPE)
    assert found == scored
    with pytest.raises(
        WiringError, match=r"seed0\.json holds a result already\. Give --overwrite, or another --results"
    ):
        call("bleu", out, "--results", kept)
    call("bleu", out, "--results", kept, "--overwrite")


def test_scoring_needs_a_finished_run_that_translates(small: Small, tmp_path: Path) -> None:
    with pytest.raises(
        WiringError, match=r"there is no .*translations\.txt\. Give the folder of a run that translates"
    ):
        score_translations(tmp_path)
    with pytest.raises(BreakError):
        loop.train(RECIPE, small(), tmp_path / "broken", device="cpu", log=Stops(10))
    with pytest.raises(WiringError, match=r"has no result\.json: its run is not finished"):
        score_translations(tmp_path / "broken")


def test_a_model_of_one_sequence_is_rejected(small: Small, tmp_path: Path) -> None:
    with pytest.raises(WiringError, match="model 'gpt' must predict the next token at each of 24 places"):
        loop.train(RECIPE, small("model.name=gpt", "model.options={density: 0.5}"), tmp_path / "run", device="cpu")


def test_a_vocabulary_of_another_size_is_rejected(small: Small, tmp_path: Path) -> None:
    with pytest.raises(WiringError, match="model 'seq2seq' knows fewer tokens than data set 'multi30k' has"):
        loop.train(RECIPE, small("model.options.classes=200"), tmp_path / "run", device="cpu")
