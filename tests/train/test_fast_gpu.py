"""Captured steps with every rule, including those that draw random numbers or change edges between steps."""

from pathlib import Path

import pytest
import torch
from breaking import Heard

from wirings import rules
from wirings.train import build, phases, recipes, results
from wirings.train import data as data_sets
from wirings.train import saved_runs as runs
from wirings.train.distributed import ProcessContext
from wirings.train.run import loop
from wirings.train.run.captured_step import capture
from wirings.train.run.optimizer import make_optimizer
from wirings.train.run.step import TrainingStep
from wirings.train.settings import Settings, with_overrides

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.filterwarnings("default")]  # warnings of the compiler
RECIPE = "digits/static-dnw"
CHANGES = ["data.name=synthetic", "data.options={shape: [1, 8, 8], examples: 50, test_examples: 40}", "batch=20"]
EVERY = [rules.get(name) for name in rules.names()]
NEW = [rule.name for rule in EVERY if not rule.needs_trained_weights]

ONE_BUDGET = [name for name in recipes.names() if name.startswith(("ste/mobilenet", "ste/resnet-nm"))]
ONE_BUDGET += [name for name in recipes.names() if name.startswith("ste/resnet") and name.endswith("-2")]
TEXT = [name for name in recipes.names() if name == "text/dense" or (name.startswith("text/") and name.endswith("-10"))]


def fast(*changes: str) -> Settings:
    return with_overrides(recipes.get(RECIPE).settings, [*CHANGES, "epochs=2", "fast=true", *changes])[0]


@pytest.mark.parametrize("rule", NEW)
def test_every_rule_is_captured(rule: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    log = Heard()
    result = loop.train(RECIPE, fast(f"rule.name={rule}"), tmp_path / "run", device="cuda", log=log)
    assert not [text for text in log.said if "cannot be captured" in text]
    assert result is not None
    assert rule == "dense" or result.edges == 200
    assert result.test_loss is not None
    loss, accuracy, _ = runs.measure(tmp_path / "run", device="cuda")
    assert loss == pytest.approx(result.test_loss, rel=1e-4)
    assert accuracy == pytest.approx(result.accuracy, abs=2.5)


@pytest.mark.parametrize("name", ONE_BUDGET)
def test_every_rule_at_one_budget_is_captured(name: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    data = "data.options={shape: [3, 32, 32], examples: 50, test_examples: 40}"
    changes = ["data.name=synthetic", data, "batch=20", "epochs=2", "schedule.warmup_epochs=0"]
    settings, overrides = with_overrides(recipes.get(name).settings, changes)
    log = Heard()
    result = loop.train(name, settings, tmp_path / "run", device="cuda", overrides=overrides, log=log)
    assert not [text for text in log.said if "cannot be captured" in text]
    assert result is not None
    assert result.steps == 6


def test_every_replay_draws_new_random_numbers() -> None:
    torch._dynamo.reset()
    settings = fast("rule.name=targeted_dropout", "rule.options={rho: 0.5}", "optimizer.lr=1e-30", "data.augment=false")
    context = ProcessContext(0, 1, torch.device("cuda"))
    found = build.load_data(settings, context)
    model, wiring = build.build(settings, found.classes, context)
    step = TrainingStep(
        model, wiring, make_optimizer(model, wiring, settings, context.device), settings, context.device
    )
    captured = capture(step, found.train, print)
    assert captured is not None
    losses = []
    for _ in range(4):
        found.train.begin(0)  # the same batch, and weights that do not change
        captured(20)
        losses.append(step.read()[0])
    assert len(set(losses)) == 4


@pytest.mark.parametrize("name", TEXT)
def test_text_is_captured(name: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    (tmp_path / "input.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    size = ["model.options.layers=2", "model.options.heads=2", "model.options.width=64", "model.options.context=16"]
    data = [f"data.directory={tmp_path / 'input.txt'}", "data.options={context: 16, epoch_steps: 5}"]
    changes = [*size, *data, "batch=8", "steps=12", "schedule.warmup_steps=2"]
    results_of = both_ways(name, changes, tmp_path, rel=0.02)
    assert [(result.steps, result.epochs) for result in results_of] == [(12, 3)] * 2
    assert results_of[0].score == pytest.approx(results_of[1].score, rel=0.02), "the same batches, lr and clipping"


@pytest.mark.parametrize("row", ["dense", "dnw-10", "soft_threshold_global-10", "random-10", "rigl-10", "dnw_16x16-10"])
def test_vision_transformers_are_captured(row: str, tmp_path: Path) -> None:
    """With stochastic depth, label smoothing, clipping and a square that augmentation hides."""
    torch._dynamo.reset()
    size = ["model.options.layers=2", "model.options.heads=2", "model.options.width=64"]
    data = ["data.name=synthetic", "data.options={shape: [3, 32, 32], examples: 50, test_examples: 40}"]
    both_ways(f"vit/{row}", [*size, *data, "batch=20", "epochs=2", "schedule.warmup_epochs=1"], tmp_path, rel=0.3)


@pytest.mark.parametrize("row", ["dense", "dnw-10", "soft_threshold_global-10", "random-10", "rigl-10"])
def test_translation_is_captured(row: str, tmp_path: Path) -> None:
    """With a graph for each length of sentences, padding and dropout."""
    pytest.importorskip("tokenizers")
    torch._dynamo.reset()
    folder = tmp_path / "pairs"
    folder.mkdir()
    data_sets.get("multi30k").write_sample(folder)
    size = ["model.options.layers=1", "model.options.heads=2", "model.options.width=32", "model.options.hidden=64"]
    options = "data.options={vocabulary: 300, lengths: [12, 24], beams: 2, bleu: false}"
    changes = [*size, f"data.directory={folder}", options, "batch=4", "steps=12", "schedule.warmup_steps=2"]
    both_ways(f"translate/{row}", changes, tmp_path, rel=0.1)


def both_ways(name: str, changes: list[str], tmp_path: Path, rel: float) -> list[results.Result]:
    """Train captured and not; with dropout, which draws other numbers, the results are only alike."""
    found = []
    for fast in (True, False):
        settings, overrides = with_overrides(recipes.get(name).settings, [*changes, f"fast={fast}".lower()])
        log = Heard()
        result = loop.train(name, settings, tmp_path / str(fast), device="cuda", overrides=overrides, log=log)
        assert not [text for text in log.said if "cannot be captured" in text]
        assert result is not None
        found.append(result)
    assert found[0].steps == found[1].steps
    assert found[0].edges == found[1].edges
    assert found[0].test_loss == pytest.approx(found[1].test_loss, rel=rel)
    return found


@pytest.mark.parametrize("rule", ["lottery", "fine_tune"])
def test_two_phases(rule: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    (tmp_path / "complete.yaml").write_text(f"base: {RECIPE}\nrule: {{name: dense}}\nfast: true\n")
    weights = "initial" if rule == "lottery" else "trained"
    settings = fast(f"rule.name={rule}", f"start.recipe={tmp_path / 'complete.yaml'}", f"start.weights={weights}")
    log = Heard()
    overrides = {"epochs": 2, "batch": 20}
    result = phases.train(rule, settings, tmp_path / "run", device="cuda", overrides=overrides, log=log)
    assert not [text for text in log.said if "cannot be captured" in text]
    assert result is not None
    assert result.edges == 200
    assert results.read(tmp_path / "complete" / "seed0" / "result.json").steps == 6


@pytest.mark.parametrize(
    ("name", "precision", "compiled"),
    [("table2/dnw", "bf16", False), ("table2/dnw", "fp32", True), ("ste/resnet-dnw_cubic-2", "bf16", True)],
)
def test_own_kernels_are_captured_and_not_compiled(name: str, precision: str, compiled: bool) -> None:
    torch._dynamo.reset()
    data = "data.options={shape: [3, 32, 32], examples: 20, test_examples: 20}"
    changed = ["data.name=synthetic", data, "batch=20", f"precision={precision}"]
    settings = with_overrides(recipes.get(name).settings, changed)[0]
    context = ProcessContext(0, 1, torch.device("cuda"))
    found = build.load_data(settings, context)
    model, wiring = build.build(settings, found.classes, context)
    step = TrainingStep(
        model, wiring, make_optimizer(model, wiring, settings, context.device), settings, context.device
    )
    assert capture(step, found.train, print) is not None
    assert (step.used is not step.model) == compiled
