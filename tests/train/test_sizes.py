"""Table 3: parameters and multiply-adds match the paper's, rounded as there, or a note says why not."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
from test_results import make
from vision import MISSING

from wirings import WiringError
from wirings.profiling import profile
from wirings.train import recipes, results
from wirings.train.networks import open_network
from wirings.train.run import loop
from wirings.train.settings import with_overrides
from wirings.train.tables import paper as tables
from wirings.train.tables.format import millions
from wirings.train.tables.sizes import CountedSize, count_size, remarks
from wirings.train.untrained import new_model

needs_torchvision = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


call = partial(commands.call, columns=300)


def size_of(name: str, *changes: str) -> CountedSize:
    recipe = recipes.get(f"table3/{name}")
    settings, _ = with_overrides(recipe.settings, changes)
    return count_size(replace(recipe, settings=settings), [])


SAME = ["mobilenetv1-0.25", "mobilenetv1-0.5", "xception-0.5", "xception-1", "densenet-1", "shufflenetv1-0.5"]


@pytest.mark.parametrize("name", SAME)
def test_sizes_match_the_paper(name: str) -> None:
    size = size_of(name)
    assert size.same
    assert size.mult_adds is not None
    assert millions(size.mult_adds, size.paper_mult_adds) == millions(size.paper_mult_adds)


@pytest.mark.slow
def test_size_of_a_random_graph_matches_the_paper_up_to_its_draw() -> None:
    sizes = [size_of("random-0.225", f"seed={seed}") for seed in (0, 2, 3)]
    mult_adds = np.array([size.mult_adds for size in sizes])
    assert {millions(size.params, size.paper_params) for size in sizes} == {"1.2M"}
    assert mult_adds.min() < 55.7e6 < mult_adds.max() <= 56_550_114
    # Every input node without an outgoing edge saves its own convolution and its channel of the first one.
    saved = (56_550_114 - mult_adds) / ((9 + 27) * 112**2)
    assert saved.round().tolist() == [0, 2, 1]
    assert np.abs(saved - saved.round()).max() < 0.2


def test_random_0_49_has_a_width_of_0_51() -> None:
    size, at_name = size_of("random-0.49"), size_of("random-0.49", "model.options.width=0.49")
    assert millions(size.mult_adds, 170e6) == "170M"
    assert [millions(at_name.mult_adds, 170e6), millions(at_name.params, 1.8e6)] == ["159M", "1.8M"]
    assert not size.same  # 1.9M parameters
    assert "0.51" in str(recipes.get("table3/random-0.49").note)


@pytest.mark.parametrize(
    ("name", "least", "params"),
    [
        ("dnw-0.225", 27.3e6, "1.2M"), ("dnw-0.3", 48.5e6, "1.4M"), ("dnw-0.49", 129.5e6, "1.8M"),
        ("dnw_small-0.15", 12.1e6, "0.27M"), ("dnw_small-0.225", 27.3e6, "0.4M"),
    ],
)  # fmt: skip
def test_size_of_a_learned_wiring_can_reach_the_papers(name: str, least: float, params: str) -> None:
    size = size_of(name)
    assert size.paper_mult_adds is not None
    assert size.edges == pytest.approx(least, abs=0.06e6)
    assert size.edges < size.paper_mult_adds < size.mult_adds
    assert millions(size.params, size.paper_params) == params


@needs_torchvision
def test_shufflenetv2_up_to_what_its_authors_count_differently() -> None:
    pooling = 7 * 7 * 1024
    # Their first unit of stage 2 passes 24 channels through its shortcut and computes the other 92 from 58.
    unit = 28 * 28 * ((24 * 24 + 58 * 92) - (24 * 58 + 58 * 58))
    half, full = size_of("shufflenetv2-0.5"), size_of("shufflenetv2-1")
    assert (half.mult_adds, full.mult_adds) == (40_476_448, 144_907_992)
    assert [millions(half.mult_adds + pooling, 41e6), millions(full.mult_adds + unit + pooling, 146e6)] == [
        "41M",
        "146M",
    ]
    assert [millions(size.params, size.paper_params) for size in (half, full)] == ["1.4M", "2.3M"]
    for name, numbers in (("shufflenetv2-0.5", [pooling]), ("shufflenetv2-1", [pooling, unit])):
        assert all(f"{number:,}" in str(recipes.get(f"table3/{name}").note) for number in numbers)


@needs_torchvision
@pytest.mark.parametrize(
    ("name", "size", "millions_"),
    [("0.15", 224, "31M"), ("0.4", 160, "42M"), ("0.6", 224, "151M"), ("0.75", 192, "154M")],
)
def test_mobilenetv2_rounds_as_torchvision(name: str, size: int, millions_: str) -> None:
    recipe = recipes.get(f"table3/mobilenetv2-{name}")
    counted = size_of(f"mobilenetv2-{name}")
    assert millions(counted.mult_adds, counted.paper_mult_adds) == millions_
    assert recipe.settings.data.image_size == recipe.settings.model.options["image_size"] == size
    assert "ShuffleNetV2's authors" in str(recipe.note)
    full = with_overrides(recipe.settings, ["model.options.width=1.0", "model.options.image_size=224"])[0]
    assert millions(profile(new_model(full)).mult_adds, 300e6) == "301M"  # the same for all, since nothing is rounded


@pytest.mark.slow
def test_every_row_of_table_3_has_a_size_or_a_reason() -> None:
    rows = tables.table(3, Path("none"), count=True)
    assert len(rows) == 23
    text = tables.render(rows)
    for row in rows:
        assert row.size is not None
        note = f"\n{row.recipe}: "
        assert (note in text) == (not row.size.same or row.size.reason is not None)
        if MISSING is None:
            assert row.size.mult_adds is not None
    assert "table3/random-0.49: The authors' settings of this row are a width of 0.51" in text
    assert "those of the edges, 27.3M, remain." in text
    first = [cell for cell in text.splitlines()[2].split("  ") if cell]
    assert [cell.strip() for cell in first[:6]] == ["table3/mobilenetv1-0.25", "0.5M", "0.5M", "41M", "41M", "50.6 %"]
    header = tables.markdown(rows).splitlines()[0]
    assert header.startswith("| recipe | paper's params | params | paper's mult-adds | mult-adds | paper |")


def test_sizes_come_from_results_if_there_are_any(tmp_path: Path) -> None:
    name = "table3/dnw-0.225"
    for seed, mult_adds in enumerate((42.0e6, 42.2e6)):
        made = make(name, seed=seed, accuracy=60.0, params=1_120_000, mult_adds=int(mult_adds))
        results.write(made, tmp_path)
    row = tables.row_of(recipes.get(name), tmp_path, sizes=True)
    assert row.size is not None
    assert (row.size.params, row.size.mult_adds, row.size.trained, row.size.same) == (1.12e6, 42.1e6, True, True)
    assert remarks(row.size, row.note) == []
    assert all(row.size is None for row in tables.table(3, tmp_path))
    assert all(row.size is None for row in tables.table(1, tmp_path, count=True))


def test_result_counts_the_trained_network(tmp_path: Path) -> None:
    changes = ["data.name=synthetic", "epochs=1", "batch=2", "precision=fp32", "fast=false", "data.image_size=null"]
    changes += ["data.options={shape: [3, 32, 32], examples: 4, test_examples: 2}"]

    def run(name: str, *more: str) -> tuple[results.Result, Any]:
        settings, overrides = with_overrides(recipes.get(name).settings, [*changes, *more])
        out = tmp_path / name.replace("/", "-")
        result = loop.train(name, settings, out, device="cpu", overrides=overrides)
        assert result is not None
        return result, profile(open_network(str(out)).model)

    result, counted = run("table2/dnw")
    assert result.params == counted.params < counted.dense_params
    assert (result.mult_adds, result.live_mult_adds) == (counted.mult_adds, counted.live_mult_adds)
    assert result.live_params == counted.live_params < result.params
    stages = [row for row in counted.rows if row.kind == "StaticGraph"]
    assert result.edges == sum(row.edges for row in stages) == 158_939
    assert result.usable_edges == sum(row.live_edges for row in stages) < result.edges
    assert result.dead_nodes == sum(row.dead_nodes for row in stages) > 0
    assert results.read(tmp_path / "table2-dnw" / "result.json") == result

    result, counted = run("table2/mobilenetv1-0.25")
    assert (result.edges, result.usable_edges, result.dead_nodes) == (None, None, None)
    assert result.params == result.live_params == counted.all_params
    assert result.mult_adds == result.live_mult_adds == counted.mult_adds

    result, counted = run("table1/static-random", "model.options.edges=1000", "schedule.kind=constant")
    assert result.params == 1000 + 7_200 + 1_248 + 1_010 > counted.params  # Table 1 counts all nodes' kernels
    assert (result.mult_adds, result.live_params) == (counted.mult_adds, counted.live_params)
    assert (result.edges, result.usable_edges) == (1000, counted.row("graph").live_edges)
    assert result.dead_nodes == counted.row("graph").dead_nodes > 100

    result, counted = run("table3/x4", "model.options.image_size=32", "model.options.classes=10")
    wired = [row for row in counted.rows if row.name.endswith(".3") and row.name != "features.3.3"]
    assert (result.edges, result.usable_edges) == (
        sum(row.edges for row in wired),
        sum(row.live_edges for row in wired),
    )


# ---- the command -----------------------------------------------------------------------------------------------------


def test_profile_command_on_recipes_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = call("profile", "digits/static-dnw")
    assert said.startswith("digits/static-dnw, before training, 1 × 8 × 8 values\nlayer ")
    model = new_model(recipes.get("digits/static-dnw").settings)
    assert str(profile(model)) in said
    call("train", "digits/static-dnw", "--device", "cpu", "--set", "epochs=1", "--out", "run")
    trained = call("profile", "run")
    assert trained.startswith("run, trained (digits/static-dnw), 1 × 8 × 8 values\n")
    assert str(profile(open_network("run").model)) in trained
    assert call("profile", "run", "--best") != ""
    stored = json.loads(call("profile", "run", "--json"))
    assert stored["params"] == profile(open_network("run").model).params
    Path("mine.yaml").write_text("base: digits/static-dnw\nmodel: {options: {edges: 50}}\n")
    assert json.loads(call("profile", "mine.yaml", "--json"))["rows"][1]["edges"] == 50
    packaged = call("profile", "table1/static-dnw", "--trained")
    assert packaged.startswith("table1/static-dnw, trained (table1/static-dnw), 3 × 32 × 32 values\n")


def test_profile_command_with_image_size_and_classes() -> None:
    small, large = (json.loads(call("profile", "table2/mobilenetv1-0.25", "--json", *more)) for more in ((), SIZE))
    assert (small["params"], large["params"]) == (small["params"],) * 2
    assert (large["mult_adds"] - 2560) / (small["mult_adds"] - 2560) == 4
    counted = json.loads(call("profile", "table3/mobilenetv1-0.25", "--classes", 10, "--json"))
    assert counted["params"] == small["params"]
    one, other = (new_model(recipes.get("table2/dnw").settings) for _ in range(2))
    assert all((a == b).all() for a, b in zip(one.parameters(), other.parameters(), strict=True))


SIZE = ("--image-size", "64")


def test_profile_command_rejects_invalid_input(tmp_path: Path) -> None:
    with pytest.raises(WiringError, match=r"Did you mean 'table2/dnw'.* Nor is 'table2/dwn' the folder of a run"):
        call("profile", "table2/dwn")
    with pytest.raises(WiringError, match="is not the folder of a run"):
        call("profile", tmp_path)
    with pytest.raises(WiringError, match="Nor is it a trained network"):
        call("profile", "table2/random", "--trained")
    with pytest.raises(WiringError, match=r"model 'tiny_static' takes images of one size\. Drop image_size=64"):
        call("profile", "table1/static-dnw", *SIZE)
    own = tmp_path / "mine.yaml"
    own.write_text("base: table2/dnw\ndata: {name: folder}\n")
    with pytest.raises(
        WiringError, match=r"classes of data set 'folder' is not known before it is read\. Give it with --classes"
    ):
        call("profile", own)
    assert "before training" in call("profile", own, "--classes", 4)
    with pytest.raises(WiringError, match="image_size = 8 is too small"):
        call("profile", "table2/dnw", "--image-size", 8)


def test_table_command_no_count() -> None:
    assert "paper's mult-adds" not in call("table", 3, "--no-count", "--results", "none")
    assert "paper's mult-adds" not in call("table", 1, "--results", "none")
