"""Networks in folders and on the Hub: what is loaded is what was saved, cards, errors; without a network connection."""

import inspect
import json
import re
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import call
from torch import nn

import wirings
from wirings import WiringError, hub, models
from wirings.history import snapshot_of
from wirings.models import registry
from wirings.train import bundled, recipes, results
from wirings.train.phases import train
from wirings.train.run import checkpoint
from wirings.train.saved_runs import open_run
from wirings.train.settings import with_overrides
from wirings.train.yaml_io import parse_yaml
from wirings.utils.text import as_markdown

RECIPE = "digits/static-dnw"
TINY = [
    "data.name=synthetic",
    "data.options={shape: [1, 8, 8], examples: 50, test_examples: 40}",
    "batch=20",
    "epochs=1",
]
DIGITS = torch.linspace(-1, 1, 3 * 64).view(3, 1, 8, 8)


def tiny_run(folder: Path, *changes: str) -> Path:
    settings, overrides = with_overrides(recipes.get(RECIPE).settings, [*TINY, *changes])
    assert train(RECIPE, settings, folder, device="cpu", overrides=overrides) is not None
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Finished runs of one recipe: seeds 0, 1 and 2."""
    folder = tmp_path_factory.mktemp("runs")
    return [tiny_run(folder / f"seed{seed}", f"seed={seed}") for seed in range(3)]


def card_of(folder: Path) -> tuple[dict[str, Any], str]:
    """The metadata of a card, and its text."""
    _, head, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return parse_yaml(head, "the metadata"), text


def row(text: str, label: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {label} |")).split(" | ")[1].rstrip(" |")


def same(one: nn.Module, other: nn.Module, x: torch.Tensor = DIGITS) -> bool:
    with torch.no_grad():
        return torch.equal(one.eval()(x), other.eval()(x))


# ---- what is loaded is what was saved --------------------------------------------------------------------------------


def test_a_run_comes_back_wired(runs: list[Path], tmp_path: Path) -> None:
    assert hub.save_pretrained(runs[0], tmp_path / "saved") == tmp_path / "saved"
    names = {"config.json", "model.safetensors", "README.md", "wiring.png"}
    assert {path.name for path in (tmp_path / "saved").iterdir()} == names
    model, original = hub.from_pretrained(tmp_path / "saved"), open_run(runs[0], device="cpu").model
    assert same(model, original)
    assert not model.training
    pairs = zip(model.wiring.masks().values(), original.wiring.masks().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(torch.equal(x, original.state_dict()[name]) for name, x in model.state_dict().items())


def test_the_network_of_the_best_epoch(tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", "epochs=4", "optimizer.lr=0.5")
    hub.save_pretrained(run, tmp_path / "saved", best=True)
    assert same(hub.from_pretrained(tmp_path / "saved"), open_run(run, best=True, device="cpu").model)
    assert "best epoch" in row(card_of(tmp_path / "saved")[1], "weights")


@pytest.mark.parametrize("change", ["rule.name=gmp", "rule.name=rigl", "rule.name=soft_threshold", "ema=0.5"])
def test_rules_with_a_memory_or_a_schedule(change: str, tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", change, "epochs=2")
    hub.save_pretrained(run, tmp_path / "saved")
    model, original = hub.from_pretrained(tmp_path / "saved"), open_run(run, device="cpu").model
    assert same(model, original)
    assert model.wiring.rule.name == original.wiring.rule.name
    assert model.wiring.state_dict() == checkpoint.read(run / "last.safetensors")[1]["wiring"]


def plain(model: nn.Module) -> nn.Module:
    return model


def wired_later(model: nn.Module) -> nn.Module:
    wirings.wire_(model, "rigl", density=0.3, share="erk")
    return model


def unwired(model: nn.Module) -> nn.Module:
    return wirings.unwire_(model)


def kept(model: nn.Module) -> nn.Module:
    wirings.wire_(wirings.finalize_(model), "keep")
    return model


def wired_again(model: nn.Module) -> nn.Module:
    return wired_later(unwired(model))


IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)
NARROW = {"width": 0.125, "classes": 7}


@pytest.mark.parametrize(
    ("name", "options", "then"),
    [
        ("resnet18", NARROW, plain),
        ("resnet18", {**NARROW, "rule": "dnw", "density": 0.2}, plain),
        ("resnet18", {**NARROW, "rule": "set", "density": 0.2, "first_dense": True}, wirings.finalize_),
        ("resnet18", {**NARROW, "rule": "dnw", "density": 0.2}, unwired),
        ("resnet18", NARROW, wired_later),
        ("resnet18", {**NARROW, "rule": "dnw", "density": 0.2}, wired_again),
        ("tiny_static", {"edges": 900}, wirings.finalize_),
        ("tiny_static", {"edges": 900}, kept),
        ("tiny_discrete", {"rule": "random", "edges": 900, "steps": 2}, plain),
        ("vit", {"rule": "dnw", "density": 0.1, "width": 32, "layers": 2, "heads": 2}, plain),
    ],
)
def test_models_by_name(
    name: str, options: dict[str, Any], then: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    model = then(models.get(name, **options))
    hub.save_pretrained(model, tmp_path, card=False)
    again = hub.from_pretrained(tmp_path)
    assert type(again).__mro__[-3:] == type(model).__mro__[-3:]
    assert same(again, model, IMAGES)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert not (tmp_path / "README.md").exists()


def test_training_goes_on_after_loading(tmp_path: Path) -> None:
    def step(model: nn.Module) -> None:
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        model.train()(DIGITS).square().sum().backward()
        optimizer.step()
        model.wiring.step(optimizer)

    torch.manual_seed(0)
    model = models.get("digits_static", rule="rigl")
    model.wiring.plan(10)
    step(model)
    hub.save_pretrained(model, tmp_path, card=False)
    again = hub.from_pretrained(tmp_path)
    step(model)
    step(again)
    assert same(model, again)


def test_compact_models(runs: list[Path], tmp_path: Path) -> None:
    model = open_run(runs[0], device="cpu").model
    small = wirings.compact(model)
    hub.save_pretrained(small, tmp_path / "saved", results=runs[0])
    again = hub.from_pretrained(tmp_path / "saved")
    assert isinstance(again, wirings.CompactModel)
    assert same(again, small)
    data, text = card_of(tmp_path / "saved")
    assert "compact" in data["tags"]
    assert row(text, "multiply-adds") == f"{small.report.after.mult_adds:,} for one example"
    assert (tmp_path / "saved" / "wiring.png").exists()  # drawn from the run's history


def test_a_network_that_comes_with_the_package(runs: list[Path], tmp_path: Path) -> None:
    hub.save_pretrained("table1/static-dnw", tmp_path / "saved")
    (data, text), card = card_of(tmp_path / "saved"), bundled.card_of("table1/static-dnw")
    assert row(text, "edges").startswith("32,000")
    assert row(text, "multiply-adds") == f"{card.mult_adds:,} for one example"
    seeds = ", ".join(sorted(card.scores))
    shown = (
        f"{card.over_seeds.partition(' (')[0]} (mean ± standard deviation of {len(card.scores)} runs, seeds {seeds})"
    )
    assert row(text, "test accuracy") == shown
    assert row(text, "test accuracy, this run") == f"{card.result} (seed 0)"
    mean = round(statistics.mean(card.scores.values()), 4)
    assert data["model-index"][0]["results"][0]["metrics"][0]["value"] == mean
    hub.save_pretrained("table1/static-dnw", tmp_path / "one", results="table1/static-dnw")
    assert row(card_of(tmp_path / "one")[1], "test accuracy") == f"{card.result} (one run, seed 0)"
    assert same(hub.from_pretrained(tmp_path / "saved"), open_run("table1/static-dnw", device="cpu").model, IMAGES)


def test_a_compact_network_that_comes_with_the_package(tmp_path: Path) -> None:
    small = wirings.compact(wirings.load("table1/static-dnw"), IMAGES)
    hub.save_pretrained(small, tmp_path / "saved", results="table1/static-dnw")
    text = card_of(tmp_path / "saved")[1]
    assert row(text, "recipe") == "table1/static-dnw"
    assert (tmp_path / "saved" / "wiring.png").exists()


def test_a_result_of_another_network_makes_no_card(runs: list[Path], tmp_path: Path) -> None:
    model = wirings.load("table1/static-dnw")
    with pytest.raises(
        WiringError, match=r"result of digits/static-dnw is that of a digits_static, but this .* tiny_st"
    ):
        hub.save_pretrained(model, tmp_path / "saved", results=runs[0])
    assert not (tmp_path / "saved").exists()


# ---- cards -----------------------------------------------------------------------------------------------------------


def test_card_of_one_run(runs: list[Path], tmp_path: Path) -> None:
    hub.save_pretrained(runs[0], tmp_path, name="me/network")
    result, (data, text) = results.read(runs[0] / "result.json"), card_of(tmp_path)
    assert data["library_name"] == "wirings"
    assert data["tags"] == ["wirings", "sparse", "dnw"]
    (measured,) = data["model-index"][0]["results"]
    assert measured["metrics"] == [{"type": "accuracy", "value": round(result.accuracy, 4), "name": "Test accuracy"}]
    assert measured["dataset"]["name"] == "synthetic"
    assert row(text, "recipe") == RECIPE
    assert row(text, "test accuracy") == f"{result} (one run, seed 0)"
    assert row(text, "edges").startswith(f"{result.edges:,}, ")
    assert row(text, "multiply-adds") == f"{result.mult_adds:,} for one example"
    assert "epochs = 1" in row(text, "changed settings")
    assert "# me/network" in text
    assert "wirings.hub.from_pretrained('me/network')" in text
    assert "![The wiring](wiring.png)" in text
    assert "wirings train" not in text  # with changed settings, the recipe alone does not lead here


def test_the_hub_reads_the_metadata(runs: list[Path], tmp_path: Path) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    hub.save_pretrained(runs[0], tmp_path, name="me/network")
    card = huggingface_hub.ModelCard.load(tmp_path / "README.md")
    assert (card.data.library_name, card.data.model_name) == ("wirings", "me/network")
    (found,) = card.data.eval_results
    result = results.read(runs[0] / "result.json")
    assert (found.metric_type, found.metric_value) == ("accuracy", round(result.accuracy, 4))
    assert (found.task_type, found.dataset_name) == ("image-classification", "synthetic")


def test_card_of_several_seeds(runs: list[Path], tmp_path: Path) -> None:
    found = [
        replace(results.read(runs[0] / "result.json"), seed=i, accuracy=x, overrides={})
        for i, x in enumerate((90.0, 92.0, 94.0))
    ]
    model = open_run(runs[0], device="cpu").model
    hub.save_pretrained(model, tmp_path, results=found)
    data, text = card_of(tmp_path)
    assert row(text, "test accuracy") == "92.00 ± 2.00 % (mean ± standard deviation of 3 runs, seeds 0, 1, 2)"
    assert row(text, "test accuracy, this run") == "90.00 % (seed 0)"
    assert data["model-index"][0]["results"][0]["metrics"][0]["value"] == 92.0
    assert f"$ wirings train {RECIPE} --seed 0" in text


def test_results_of_a_card_are_those_of_one_recipe(runs: list[Path], tmp_path: Path) -> None:
    hub.save_pretrained(runs[0], tmp_path, results=[*runs[::-1], runs[1] / "result.json"])
    assert row(card_of(tmp_path)[1], "test accuracy").endswith("of 3 runs, seeds 0, 1, 2)")
    first = results.read(runs[0] / "result.json")
    with pytest.raises(WiringError, match="same recipe, got 'digits/static-dnw' and 'other/one'"):
        hub.save_pretrained(runs[0], tmp_path, results=replace(first, recipe="other/one", seed=1))
    with pytest.raises(WiringError, match="same overrides"):
        hub.save_pretrained(runs[0], tmp_path, results=[replace(first, overrides={}, seed=1)])
    with pytest.raises(WiringError, match="two different results of seed 0"):
        hub.save_pretrained(runs[0], tmp_path, results=replace(first, accuracy=1.0))


def test_metrics_of_text(runs: list[Path], tmp_path: Path) -> None:
    of_text = {"metric": "bits_per_byte", "higher_is_better": False, "value": 1.25, "best_value": 1.2}
    result = replace(results.read(runs[0] / "result.json"), **of_text)
    hub.save_pretrained(open_run(runs[0], device="cpu").model, tmp_path, results=result)
    data, text = card_of(tmp_path)
    assert row(text, "test bits per byte") == "1.2500 bits per byte (one run, seed 0)"
    assert data["pipeline_tag"] == "text-generation"


def test_card_of_a_dense_network(runs: list[Path], tmp_path: Path) -> None:
    settings = {"model": {"name": "resnet18"}}
    result = replace(results.read(runs[0] / "result.json"), edges=None, dead_nodes=None, settings=settings)
    hub.save_pretrained(models.get("resnet18", width=0.125), tmp_path, results=result)
    text = card_of(tmp_path)[1]
    assert "A dense network, trained with wirings" in text
    assert "wiring.png" not in text
    assert not (tmp_path / "wiring.png").exists()


HOSTILE = "x|y\n# <script>alert(1)</script> [a](javascript:b) `c` \x1b[2J ---\n www.evil.org"


def test_names_from_outside_are_text(runs: list[Path], tmp_path: Path) -> None:
    first = results.read(runs[0] / "result.json")
    settings = {**first.settings, "rule": {"name": HOSTILE}, "data": {"name": HOSTILE}}
    result = replace(first, recipe=HOSTILE, settings=settings, hardware=HOSTILE, overrides={HOSTILE: HOSTILE})
    hub.save_pretrained(open_run(runs[0], device="cpu").model, tmp_path, results=result, name=HOSTILE)
    whole = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert all(c.isprintable() or c == "\n" for c in whole)
    data, text = card_of(tmp_path)
    assert set(data) == {"library_name", "tags", "pipeline_tag", "model-index"}
    outside = re.sub(r"```python.*?```", "", text, flags=re.DOTALL)
    assert "<" not in outside
    assert not re.search(r"(?<!\\)\[a", outside)
    assert "javascript:" not in outside
    assert "www.evil" not in outside
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in rows)
    assert len([line for line in text.splitlines() if line.startswith("#")]) == 2
    (line,) = (line for line in text.splitlines() if line.startswith("model = "))
    assert "\\x1b" in line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("settings", {"rule": None, "data": "x"}),
        ("settings", {"rule": [HOSTILE], "data": {"name": [HOSTILE]}}),
        ("settings", {"rule": {"name": HOSTILE * 1000}, "data": {"name": HOSTILE * 1000}}),
        ("settings", {}),
        ("overrides", {HOSTILE: {HOSTILE: [HOSTILE]}}),
        ("versions", {HOSTILE: HOSTILE}),
        ("hardware", HOSTILE * 1000),
        ("params", 10**400),
    ],
)
def test_edited_results_make_a_card_of_plain_text(key: str, value: Any, runs: list[Path], tmp_path: Path) -> None:
    mapping = json.loads((runs[0] / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps({**mapping, key: value}))
    hub.save_pretrained(models.get("digits_static"), tmp_path / "saved", results=tmp_path / "result.json")
    whole = (tmp_path / "saved" / "README.md").read_text(encoding="utf-8")
    assert all(c.isprintable() or c == "\n" for c in whole)
    assert len(whole) < 5000
    data, text = card_of(tmp_path / "saved")
    assert set(data) == {"library_name", "tags", "pipeline_tag", "model-index"}
    assert not re.search(r"<script|(?<!\\)\[a|javascript:|www\.evil", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


@pytest.mark.parametrize(
    "change",
    [
        {"settings": None},
        {"recipe": 3},
        {"hardware": ["x"]},
        {"seed": "0"},
        {"accuracy": float("nan")},
        {"metric": "x"},
    ],
)
def test_results_of_wrong_types_are_one_error(change: dict[str, Any], runs: list[Path], tmp_path: Path) -> None:
    mapping = json.loads((runs[0] / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps({**mapping, **change}))
    with pytest.raises(WiringError, match=rf"result\.json is not a result.*{next(iter(change))}"):
        hub.save_pretrained(models.get("digits_static"), tmp_path / "saved", results=tmp_path / "result.json")
    (tmp_path / "result.json").write_text(json.dumps(mapping) + " " * 2**22)
    with pytest.raises(WiringError, match=r"it has more than 4,194,304 bytes"):
        hub.save_pretrained(models.get("digits_static"), tmp_path / "saved", results=tmp_path / "result.json")


def test_markdown_of_plain_names_is_readable() -> None:
    assert as_markdown("table1/static-dnw (seed 0), 80.9 ± 0.6 %") == "table1/static-dnw (seed 0), 80.9 ± 0.6 %"
    assert len(as_markdown("x" * 10_000)) < 300


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_card_needs_a_result(runs: list[Path], tmp_path: Path) -> None:
    unfinished = tmp_path / "run"
    shutil.copytree(runs[0], unfinished, ignore=shutil.ignore_patterns("result.json"))
    with pytest.raises(WiringError, match=r"has no result\.json, which the model card is made from"):
        hub.save_pretrained(unfinished, tmp_path / "saved")
    with pytest.raises(WiringError, match="card=False"):
        hub.save_pretrained(models.get("digits_static"), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    hub.save_pretrained(unfinished, tmp_path / "saved", card=False)


def test_models_that_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(WiringError, match=r"Sequential is not a network of wirings\.models.*wirings\.compact"):
        hub.save_pretrained(nn.Sequential(nn.Linear(2, 2)), tmp_path, card=False)
    twice = models.get("resnet18", width=0.125)
    for part in (twice.stages, twice.head):
        wirings.wire_(part, "dnw", density=0.5)
    with pytest.raises(WiringError, match="was wired 2 times"):
        hub.save_pretrained(twice, tmp_path, card=False)
    in_part = models.get("digits_static")
    wirings.wire_(in_part.head, "dnw", density=0.5)
    with pytest.raises(WiringError, match="was wired 2 times"):
        hub.save_pretrained(in_part, tmp_path, card=False)
    with pytest.raises(WiringError, match="best=True selects a checkpoint of a run"):
        hub.save_pretrained(twice, tmp_path, card=False, best=True)
    with pytest.raises(WiringError, match="is not the folder of a run"):
        hub.save_pretrained(tmp_path / "nothing", tmp_path / "saved")
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "in"):
        with pytest.raises(WiringError, match="file is a file"):
            hub.save_pretrained(models.get("digits_static"), folder, card=False)


def edited(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"library_name": "timm"}, "does not hold a network of wirings"),
        ({"library_name": "transformers", "architectures": ["GPT2"]}, r"model of transformers.*rewire_"),
        ({"format": 99}, "Upgrade wirings"),
        ({"kind": "other"}, "Upgrade wirings"),
        ({"kind": "compact"}, "cannot be loaded"),
        ({"model": {"name": "os:system", "options": {}}}, "unknown model 'os:system'"),
        ({"model": {"name": "digits_static", "options": {"classes": "ten"}}}, "classes must be"),
        ({"model": {"name": "digits_static", "options": {"classes": 3}}}, "do not fit"),
        ({"model": {"name": "digits_static", "options": [1]}}, "cannot be loaded"),
        ({"model": {"name": ["digits_static"], "options": {}}}, "cannot be loaded"),
        ({"model": None}, "cannot be loaded"),
        ({"rule": {"name": "mine:rule"}}, "unknown rule 'mine:rule'"),
        ({"rule": "dnw"}, "cannot be loaded"),
        ({"state": {"rule": "set"}}, "saved with rule 'set'"),
        ({"state": None}, "cannot be loaded"),
    ],
)
def test_foreign_and_damaged_configs(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    hub.save_pretrained(models.get("digits_static"), tmp_path, card=False)
    with pytest.raises(WiringError, match=message):
        hub.from_pretrained(edited(tmp_path, **changes))


def places_in(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys that lead to every value in nested mappings and lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, one in inner for place in places_in(one, (*at, key)))]


@pytest.mark.slow
@pytest.mark.parametrize("wire", [plain, wired_later])
def test_any_value_in_a_config_is_accepted_or_explained(wire: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    hub.save_pretrained(wire(models.get("resnet18", **NARROW)), tmp_path, card=False)
    text, messages = (tmp_path / "config.json").read_text(), []
    for place in places_in(json.loads(text))[1:]:
        if any(isinstance(key, int) and key > 1 for key in place):
            continue  # two wired layers stand for all
        for junk in (None, -1, 10**30, "x", []):
            config = json.loads(text)
            holder = config
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = junk
            (tmp_path / "config.json").write_text(json.dumps(config))
            try:
                hub.from_pretrained(tmp_path)
            except WiringError as error:
                messages.append(str(error))
    assert len(messages) > 20
    assert max(map(len, messages)) < 1000


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt", {"layers": 10**9}, "layers = 1000000000 is out of proportion to the weights file"),
        ("gpt", {"width": 10**400}, r"width = about 2\^1329 is out of proportion"),
        ("resnet18", {"width": float("nan")}, "width = nan is out of proportion"),
        ("gpt", {"layers": 4000, "width": 4, "heads": 1, "context": 4}, "many more layers than its weights file"),
        ("gpt", {"width": 4092, "layers": 4000}, r"takes more than 64 MiB, but its weights take 24,\d+ bytes"),
        ("vit", {"image_size": 4096, "patch": 4}, "takes more than 64 MiB"),
        ("seq2seq", {"length": 4096, "width": 4096, "classes": 4, "hidden": 8}, "takes more than 64 MiB"),
        ("resnet18", {"image_size": 4096, "density": 0.1, "mult_adds": 10**9}, "takes more than 64 MiB"),
    ],
)
def test_a_network_far_larger_than_its_weights_is_refused(
    name: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    hub.save_pretrained(models.get("digits_static"), tmp_path, card=False)
    before, start = peak_bytes(), time.monotonic()
    with pytest.raises(WiringError, match=message):
        hub.from_pretrained(edited(tmp_path, model={"name": name, "options": options}))
    assert time.monotonic() - start < 30
    assert peak_bytes() - before < 2**30


def peak_bytes() -> int:
    """The most memory that this process has taken."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def test_a_huge_config_is_not_read(tmp_path: Path) -> None:
    hub.save_pretrained(models.get("digits_static"), tmp_path, card=False)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text + " " * 2**24)
    with pytest.raises(WiringError, match="does not hold a network of wirings"):
        hub.from_pretrained(tmp_path)


def test_options_of_your_own_models_may_be_any_number(tmp_path: Path) -> None:
    def own(seed: int = 0) -> nn.Module:
        return nn.Linear(seed % 7 + 1, 2)

    own.__module__ = "mine"
    models.register(own)
    try:
        hub.save_pretrained(models.get("own", seed=10**12), tmp_path, card=False)
        assert hub.from_pretrained(tmp_path).in_features == 10**12 % 7 + 1
    finally:
        registry._registry.pop("own")


def test_folders_that_are_not_ours(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(WiringError, match=r"expected config\.json and model\.safetensors"):
        hub.from_pretrained(tmp_path)
    with pytest.raises(WiringError, match=r"is the folder of a run.*open_run"):
        hub.from_pretrained(runs[0])
    with pytest.raises(WiringError, match="load_compact"):
        hub.from_pretrained(runs[0] / "last.safetensors")
    with pytest.raises(WiringError, match="revision: options of the Hub"):
        hub.from_pretrained(tmp_path, revision="main")
    hub.save_pretrained(models.get("digits_static"), tmp_path, card=False)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(WiringError, match="does not hold a network of wirings"):
        hub.from_pretrained(tmp_path)


def test_damaged_weights(tmp_path: Path) -> None:
    hub.save_pretrained(models.get("digits_static"), tmp_path, card=False)
    path = tmp_path / "model.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(bytes(whole))
    with pytest.raises(WiringError, match=r"cannot be loaded.*checksum"):
        hub.from_pretrained(tmp_path)
    path.unlink()
    with pytest.raises(WiringError, match="cannot be loaded"):
        hub.from_pretrained(tmp_path)


# ---- the Hub ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the repository ``me/network`` on the Hub."""
    hub_mixin = pytest.importorskip("huggingface_hub.hub_mixin")
    import huggingface_hub

    from wirings.train.hub import mixin

    folder, api = tmp_path / "hub", Mock()

    def upload_folder(*, folder_path: Path, **options: Any) -> str:
        shutil.copytree(folder_path, folder)
        (folder / ".options.json").write_text(json.dumps(options))
        return f"https://hub/{options['repo_id']}/commit/1"

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], **options: Any) -> str:
        inspect.signature(huggingface_hub.snapshot_download).bind(repo_id, allow_patterns=allow_patterns, **options)
        assert repo_id == "me/network"
        assert allow_patterns == ["config.json", "model.safetensors"]
        return str(folder)

    api.create_repo.side_effect = lambda repo_id, **options: Mock(repo_id=repo_id)
    api.upload_folder.side_effect = upload_folder
    monkeypatch.setattr(hub_mixin, "HfApi", lambda token=None: api)
    monkeypatch.setattr(hub_mixin, "hf_hub_download", lambda repo_id, filename, **options: str(folder / filename))
    monkeypatch.setattr(mixin, "snapshot_download", snapshot_download)
    return folder


def test_push_and_load(runs: list[Path], repository: Path) -> None:
    address = hub.push_to_hub(runs[0], "me/network", results=runs[1:], branch="v1", create_pr=True)
    assert address == "https://hub/me/network/commit/1"
    options = json.loads((repository / ".options.json").read_text())
    assert (options["revision"], options["create_pr"], options["repo_type"]) == ("v1", True, "model")
    assert "of 3 runs" in row(card_of(repository)[1], "test accuracy")
    assert "from_pretrained('me/network')" in card_of(repository)[1]
    assert same(hub.from_pretrained("me/network", revision="v1"), open_run(runs[0], device="cpu").model)


def test_push_a_compact_model(runs: list[Path], repository: Path) -> None:
    small = wirings.compact(open_run(runs[0], device="cpu").model)
    hub.push_to_hub(small, "me/network", results=runs)
    assert same(hub.from_pretrained("me/network"), small)


def test_the_command(runs: list[Path], repository: Path) -> None:
    said = call("push", runs[0], "me/network", "--result", runs[1], "--result", runs[2] / "result.json")
    assert said == "wrote https://hub/me/network/commit/1\n"
    assert "of 3 runs" in row(card_of(repository)[1], "test accuracy")


def test_nothing_is_made_on_the_hub_before_all_is_checked(repository: Path) -> None:
    from huggingface_hub import hub_mixin

    with pytest.raises(WiringError, match="card=False"):
        hub.push_to_hub(models.get("digits_static"), "me/network")
    hub_mixin.HfApi().create_repo.assert_not_called()


def test_errors_of_the_hub(runs: list[Path], repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors, hub_mixin

    from wirings.train.hub import mixin

    response = Mock(status_code=403, headers={})
    for error, message in (
        (ConnectionError("Name or service not known"), r"Is there a network connection.*Name or service not known"),
        (errors.OfflineModeIsEnabled("offline mode is enabled"), "Is there a network connection"),
        (errors.RepositoryNotFoundError("404", response=response), "does not exist, or it is private"),
        (errors.GatedRepoError("403", response=response), "grant access"),
        (errors.RevisionNotFoundError("no v9", response=response), "no such revision"),
        (errors.HFValidationError("Repo id must"), "expected a name such as 'user/network'"),
        (TypeError("unexpected keyword 'revisoin'"), "revisoin"),
    ):
        monkeypatch.setattr(mixin, "snapshot_download", Mock(side_effect=error))
        monkeypatch.setattr(
            hub_mixin, "hf_hub_download", Mock(side_effect=errors.RemoteEntryNotFoundError("", response=response))
        )
        with pytest.raises(
            WiringError, match=f"there is no folder me/network, and it could not be loaded from the Hub.*{message}"
        ):
            hub.from_pretrained("me/network")
    for error, message in (
        (errors.LocalTokenNotFoundError("no token"), "hf auth login"),
        (errors.HfHubHTTPError("403", response=response), "hf auth login"),
        (errors.BadRequestError("Invalid metadata", response=Mock(status_code=400, headers={})), "Invalid metadata"),
        (OSError("Network is unreachable"), "Is there a network connection"),
    ):
        hub_mixin.HfApi().create_repo.side_effect = error
        with pytest.raises(WiringError, match=f"me/network could not be uploaded.*{message}"):
            hub.push_to_hub(runs[0], "me/network")


def test_a_repository_that_is_not_ours(repository: Path) -> None:
    repository.mkdir()
    (repository / "config.json").write_text('["not", "a", "mapping"]')
    with pytest.raises(WiringError, match="is not a network of wirings"):
        hub.from_pretrained("me/network")
    (repository / "config.json").write_text('{"architectures": ["GPT2"]}')
    with pytest.raises(WiringError, match=r"me/network does not hold a network of wirings.*rewire_"):
        hub.from_pretrained("me/network")


def test_folders_need_no_package(runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delitem(sys.modules, "wirings.train.hub.mixin", raising=False)
    monkeypatch.delattr(hub, "mixin", raising=False)
    hub.save_pretrained(runs[0], tmp_path / "saved")
    hub.from_pretrained(tmp_path / "saved")
    with pytest.raises(WiringError, match=r"pip install wirings\[hub\]"):
        hub.push_to_hub(runs[0], "me/network")
    with pytest.raises(WiringError, match=r"there is no folder me/network, and .* pip install wirings\[hub\]"):
        hub.from_pretrained("me/network")


def test_the_picture_shows_the_model(runs: list[Path]) -> None:
    from wirings.train.hub.card import _picture

    picture = _picture(open_run(runs[0], device="cpu").model, None)
    assert picture is not None
    assert picture.what.structure.layers == snapshot_of(open_run(runs[0], device="cpu").model).structure.layers


def test_a_full_disk_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(WiringError, match=r"the disk is full\. Free some space, or give another folder\.$"):
        hub.save_pretrained(models.get("digits_static", rule="dnw", edges=100), tmp_path / "hub", card=False)


def test_other_weights_with_a_valid_checksum_are_checked(tmp_path: Path) -> None:
    hub.save_pretrained(models.get("digits_static", rule="dnw", edges=100), tmp_path, card=False)
    tensors, about = checkpoint.read(tmp_path / "model.safetensors")
    name = next(name for name, x in tensors.items() if x.dim())
    for other in (tensors[name][:1].clone(), tensors[name].bool(), torch.zeros(0)):
        checkpoint.write_tensors(tmp_path / "model.safetensors", {**tensors, name: other}, about)
        with pytest.raises(WiringError, match=re.escape(str(tmp_path))):
            hub.from_pretrained(tmp_path)
