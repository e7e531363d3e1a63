"""Benchmarks run at a tiny size and write a record of what they measured."""

import importlib
import json
import math
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from benchmarks import adamw_defaults, block_models, semi_structured_training
from benchmarks.common import compare
from wirings import models
from wirings.train import recipes, results
from wirings.train.settings import to_mapping

ROOT = Path(__file__).parents[1]


class RunBenchmark(Protocol):
    """Runs a benchmark by name with options; returns what it prints and the record that it writes."""

    def __call__(self, name: str, *options: str) -> tuple[str, dict[str, Any]]: ...


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunBenchmark:
    def call(name: str, *options: str) -> tuple[str, dict[str, Any]]:
        out = tmp_path / "record.json"
        monkeypatch.setattr(sys, "argv", [name, *options, f"--out={out}"])
        importlib.import_module(f"benchmarks.{name}").main()
        record = json.loads(out.read_text())
        assert {"benchmark", "settings", "hardware", "versions", "commit", "date", "rows"} <= record.keys()
        return capsys.readouterr().out, record

    return call


def test_clipping(run: RunBenchmark) -> None:
    sizes = ["--layers=1", "--width=64", "--tokens=8", "--batch=1", "--seconds=0"]
    out, record = run("clipping", "--device=cpu", *sizes)
    assert [row["clipping"] for row in record["rows"]] == ["no clipping", "all edges", "edges in use"]
    assert all(row["median_s"] > 0 for row in record["rows"])
    assert out.count("ms per step") == 3


def test_rigl_adam(run: RunBenchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.small_gpt.TEST_BATCHES", 1)
    (tmp_path / "text.txt").write_text("to be or not to be " * 100)
    out, record = run("rigl_adam", str(tmp_path / "text.txt"), "--steps=20", "--seeds=0", "--rates=0.01")
    assert [row["rule"] for row in record["rows"]] == ["random", "set", "rigl, listen=1", "rigl"]
    assert all(0 < row["bits_per_byte"] < 10 for row in record["rows"])
    assert ["received" in row for row in record["rows"]] == [False, True, True, True]
    assert out.count("**") == 8  # one best rate for each rule


def test_adamw_defaults(run: RunBenchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.small_gpt.TEST_BATCHES", 1)
    monkeypatch.setattr("benchmarks.adamw_defaults.FEWEST", 0.005)
    monkeypatch.setattr("benchmarks.adamw_defaults.MOST", 0.03)
    (tmp_path / "text.txt").write_text("to be or not to be " * 100)
    sides = ["dnw", "dnw, scaled", "dnw, only real edges decay", "dnw, no edge decays", "dnw, ¼ to ¾", "dnw, 0 to ½"]
    out, record = run(
        "adamw_defaults",
        str(tmp_path / "text.txt"),
        "--steps=10",
        "--seeds",
        "0",
        "1",
        "--rates=0.01",
        "--only",
        *sides,
    )
    rows = record["rows"]
    assert list(dict.fromkeys(row["side"] for row in rows)) == sides
    assert len({row["test"] for row in rows if row["rate"] == 0.01 and row["seed"] == 0}) == len(sides)
    first, second = ([row["rate"] for row in rows if row["side"] == "dnw" and row["seed"] == seed] for seed in (0, 1))
    assert {0.01, 0.007071, 0.01414} <= set(first)
    assert len(second) == 2  # the best ones
    assert set(second) < set(first)
    assert out.count("| `dnw` |") == 4


def test_rates_that_only_the_first_seed_stands_are_not_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates above 0.01 diverge for the second seed, so it trains with both, after those that seemed better."""
    asked = []

    def value(self: adamw_defaults.Study, side: str, rate: float, seed: int) -> float:
        asked.append((round(rate, 4), seed))
        return math.inf if seed and rate > 0.012 else 1 + abs(rate - 0.02)

    monkeypatch.setattr(adamw_defaults.Study, "value", value)
    study = adamw_defaults.Study(torch.zeros(100), 10, [0, 1], [0.01, 0.02, 0.04], None)
    study.tune("dnw")
    assert {rate for rate, seed in asked if seed} == {0.01, 0.0141, 0.02, 0.0283}  # not 0.04
    assert {rate for rate, _ in asked} == {0.01, 0.0141, 0.02, 0.0283, 0.04}


def test_best_rate_is_chosen_on_text_of_its_own() -> None:
    runs = [(0.1, 0, 3.0, 1.0), (0.2, 0, 2.0, 2.5), (0.2, 1, 2.2, 2.7), (0.3, 0, 2.1, 0.5), (0.3, 1, 2.2, 0.5)]
    runs.append((0.4, 0, None, None))  # diverged
    rows = [{"side": "dnw", "rate": rate, "seed": seed, "choose": a, "test": b} for rate, seed, a, b in runs]
    best = adamw_defaults.best_of(rows, "dnw")
    assert (best.rate, best.values, best.bracketed) == (0.2, [2.5, 2.7], True)


def test_block_products(run: RunBenchmark) -> None:
    sizes = ["--shapes=32x64x16", "--densities=0.5", "--blocks=16", "--seconds=0"]
    text, record = run("block_products", "--device=cpu", *sizes)
    (row,) = record["rows"]
    assert (row["block"], row["way"]) == (16, "called")
    assert {"forward, dense", "forward, blocks", "step, blocks, all gradients"} < row["times"].keys()
    assert row["gains"]["step, dense"] == 1
    assert text.count("x dense, called") == 7


def test_block_models(run: RunBenchmark) -> None:
    text, record = run("block_models", "--device=cpu", "--small", "--blocks", "16", "--seconds=0")
    found = {(row["part"], row["what"], row["side"]) for row in record["rows"]}
    assert {("linear", "forward, 16x16", "16x16"), ("inference", "MLPs alone", "2:4")} < found
    assert ("training", "2 steps", "16x16, dnw") in found
    assert all(row["gain"] == 1 for row in record["rows"] if row["side"] == "dense")
    assert text.count("wrote") == 3
    rendered = block_models.table(record).splitlines()
    assert any(line.startswith("| training, 2 steps, 16x16, dnw |") for line in rendered)
    assert "`gradient_every=2`" in rendered[-1]
    assert "Not measured yet" in block_models.table(None)


def test_semi_structured_training(run: RunBenchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dense products in place of those of a GPU, all but the capture runs on a CPU."""

    def multiply(packed: Tensor, x: Tensor, transpose_result: bool, alg_id: int) -> Tensor:
        assert transpose_result
        assert alg_id in (0, 3)
        return (packed @ x).t()

    def tile(weight: Tensor, algorithm: str, use_cutlass: bool) -> tuple[Tensor, ...]:
        assert algorithm == "largest_abs_values_greedy"
        if use_cutlass:
            raise NotImplementedError("not on this GPU\nbut on others")
        return weight + 1, weight, weight.t().contiguous(), weight, weight  # the first one is wrong

    monkeypatch.setattr(torch, "_cslt_compress", lambda weight: weight.clone())
    monkeypatch.setattr(torch, "_cslt_sparse_mm", multiply)
    monkeypatch.setattr(torch, "_cslt_sparse_mm_search", lambda packed, x, transpose_result: 3)
    monkeypatch.setattr(torch, "_sparse_semi_structured_tile", tile)
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda weight: weight.clone())
    monkeypatch.setattr(semi_structured_training, "check_gpu", lambda: "cpu")
    text, record = run("semi_structured_training", "--shapes", "64x32x16", "32x32x8", "--seconds=0")
    assert {(row["outputs"], row["inputs"], row["tokens"]) for row in record["rows"]} == {(64, 32, 16), (32, 32, 8)}
    found = {(row["part"], row["side"]): row for row in record["rows"][:22]}
    assert len(found) == 22
    failed = {at: row["error"] for at, row in found.items() if "error" in row}
    assert failed.pop(("forward", "2:4, CUTLASS")) == "NotImplementedError: not on this GPU"
    assert failed.pop(("gradient of inputs", "2:4, CUTLASS")) == "NotImplementedError: not on this GPU"
    assert set(failed) == {("forward", "2:4, packed by tile"), ("step", "2:4 both, packed by tile")}
    assert all("its results differ from the dense ones by" in why for why in failed.values())
    timed = [row for at, row in found.items() if "error" not in row]
    assert all(row["median_s"] > 0 and row["n"] >= 3 and row["gain"] > 0 and row["way"] == "called" for row in timed)
    assert {row["part"] for row in timed if row["side"] == "dense"} == {
        "forward", "gradient of inputs", "gradient of weight", "choose and pack", "step"
    }  # fmt: skip
    assert all(row["difference"] < 1e-5 for row in timed if row["side"].startswith("2:4"))
    assert text.count(" x dense, called") == 2 * len(timed)
    assert text.count("| 32 → 64, 16 | ") == 22


def test_semi_structured_training_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["semi_structured_training", "--shapes", "64x32x16"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"needs a GPU with 2:4 tensor cores .*8\.0 or more\), got no CUDA device\."):
        semi_structured_training.main()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "An old GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(SystemExit, match=r"got An old GPU of compute capability 7\.5"):
        semi_structured_training.main()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert semi_structured_training.check_gpu() == "cuda"
    monkeypatch.setattr(sys, "argv", ["semi_structured_training", "--shapes", "64x32"])
    with pytest.raises(SystemExit, match="OUTPUTSxINPUTSxTOKENS such as 3072x768x8192, got 64x32"):
        semi_structured_training.main()


def test_failures_of_2_of_4_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be captured is called, and what fails while it is timed leaves the other parts alone."""
    x = torch.ones(2, 2)

    def capture(run: Any) -> Any:
        if run() is not x:
            raise RuntimeError("operation not permitted when stream is capturing")
        return run

    monkeypatch.setattr(semi_structured_training, "captured", capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(semi_structured_training, "compare", lambda runs, device, seconds: compare(runs, "cpu", 0.0))
    sides: dict[str, Any] = {"dense": lambda: lambda: x, "2:4": lambda: lambda: x.clone()}
    dense, sparse = semi_structured_training.measure("forward", sides, "cuda", 0.0)
    assert (dense["way"], sparse["way"]) == ("captured", "called")
    assert sparse["not_captured"] == "RuntimeError: operation not permitted when stream is capturing"
    assert sparse["gain"] == dense["median_s"] / sparse["median_s"]

    def fail(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(semi_structured_training, "compare", fail)
    rows = semi_structured_training.measure("forward", sides, "cpu", 0.0)
    why = "while it was timed, RuntimeError: CUDA error: an illegal memory access was encountered"
    assert [row["error"] for row in rows] == [why, why]
    assert semi_structured_training.described(rows[1]) == f"  forward            2:4                      failed: {why}"


def test_the_table_of_2_of_4_training() -> None:
    size = {"outputs": 3072, "inputs": 768, "tokens": 8192, "part": "forward"}
    times = {"median_s": 2e-4, "q1_s": 1.99e-4, "q3_s": 2.5e-4, "n": 200, "way": "captured", "gain": 1.0}
    rows: list[dict[str, Any]] = [
        {**size, "side": "dense", **times},
        {**size, "side": "2:4", **times, "median_s": 1.6e-4, "gain": 1.25, "way": "called"},
        {**size, "side": "2:4, CUTLASS", "error": "RuntimeError: no"},
    ]
    record = {"hardware": "NVIDIA H200", "versions": {"torch": "2.11"}, "rows": rows}
    assert semi_structured_training.table(record).splitlines() == [
        "| inputs → outputs, tokens | | | ms | quartiles | × dense |",
        "|---|---|---|---:|---:|---:|",
        "| 768 → 3,072, 8,192 | forward | dense | 0.2000 | 0.1990 to 0.2500 | 1.00 |",
        "| 768 → 3,072, 8,192 | forward | 2:4 | 0.1600 (called) | 0.1990 to 0.2500 | 1.25 |",
        "| 768 → 3,072, 8,192 | forward | 2:4, CUTLASS | RuntimeError: no | | |",
        "",
        "(NVIDIA H200, bfloat16, torch 2.11; medians of turns.)",
    ]


def make(recipe: str, seed: int, accuracy: float, best: float | None = None) -> results.Result:
    return results.Result(
        recipe=recipe, seed=seed, accuracy=accuracy, best_accuracy=best, epochs=1, steps=1, params=1, overrides={},
        precision="bf16", settings=to_mapping(recipes.get(recipe).settings), hardware="", versions={},
        commit=None, dirty=None, started="2026-01-01T00:00:00", train_s=1.0, wall_s=1.0,
    )  # fmt: skip


def test_step_cost_benchmark(run: RunBenchmark) -> None:
    small = ["--device=cpu", "--small", "--rounds=2", "--steps=1", "--warmup=1", "--ways", "called", "--network"]
    text, record = run("step_cost", *small, "gpt", "perceptron")
    assert [(row["network"], row["way"]) for row in record["rows"]] == [("gpt", "called"), ("perceptron", "called")]
    for network in record["rows"]:
        assert {row["side"] for row in network["rows"]} >= {"dense", "dnw", "soft_threshold, global", "top_kast"}
        assert all(row["times"]["median_s"] > 0 and row["ratio"] > 0 for row in network["rows"])
    assert text.count("compared with dense") == 14


@pytest.mark.slow
def test_sparse_step_benchmark(run: RunBenchmark) -> None:
    small = [
        "--device=cpu",
        "--model=resnet18",
        "--width=0.25",
        "--batch=2",
        "--size=8",
        "--rounds=3",
        "--steps=1",
        "--warmup=1",
        "--no-compile",
    ]
    text, record = run("sparse_step", *small)
    (row,) = record["rows"]
    assert row["way"] == "called"
    assert set(row["times"]) == set(row["ratios"]) == set(row["peak_bytes"]) == {"dense", "wired", "authors"}
    assert row["ratios"]["dense"] == 1
    assert all(taken["n"] == 3 for taken in row["times"].values())
    assert "called, wired: " in text


@pytest.mark.slow
def test_billion_weights_benchmark(run: RunBenchmark) -> None:
    text, record = run("billion", "--layers=3", "--width=64", "--limit=8")
    dense, wired = record["rows"]
    assert (dense["weights"], wired["weights"], wired["edges"]) == (3 * 64**2, 3 * 64**2, 3 * 409)
    assert list(wired["phases"]) == ["built", "wired", "first step", "second step", "finalized"]
    assert wired["peak_bytes"] > 10**7
    assert "within 24 GB" in text


def test_billion_weights_fit_in_24_gigabytes() -> None:
    record = json.loads((ROOT / "results" / "benchmarks" / "billion-cpu.json").read_text())
    wired = next(row for row in record["rows"] if row["side"] == "wired")
    assert record["settings"]["layers"] == 100
    assert wired["weights"] >= 10**9
    assert wired["peak_bytes"] < 24e9


@pytest.mark.slow
def test_latency_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    benchmark = importlib.import_module("benchmarks.latency_tokens")
    monkeypatch.setattr(benchmark, "ENCODER", {"layers": 1, "width": 32, "heads": 2})
    small = {"layers": 1, "width": 32, "heads": 2, "context": 136, "classes": 16}
    monkeypatch.setattr(benchmark, "DECODER", small)
    monkeypatch.setattr(sys, "argv", ["latency_tokens", "--threads=1", "--seconds=0.2", f"--out={tmp_path / 'r.json'}"])
    benchmark.main()
    record = json.loads((tmp_path / "r.json").read_text())
    assert [row["density"] for row in record["encoder"]["rows"]] == [0.1, 0.05]
    assert [(row["density"], row["tokens"]) for row in record["decoder"]["rows"]] == [(0.1, 128), (1.0, 128)]
    assert all(0 < row["losses"]["bfloat16"] < 0.05 for row in record["decoder"]["rows"])
    for part in ("encoder", "decoder"):
        assert {"hardware", "versions", "commit", "date"} <= record[part].keys()
        for row in record[part]["rows"]:
            assert {"engine", "engine, int8", "ONNX Runtime, int8", "PyTorch"} < row["times"].keys()
            assert all(taken["median_s"] > 0 for taken in row["times"].values())


@pytest.mark.slow
def test_networks_benchmark(run: RunBenchmark) -> None:
    networks = importlib.import_module("benchmarks.networks")
    options = ("--only", "nn.TransformerEncoder", "graph network", "--seconds=0.1", "--engine=sparse", "--threads=1")
    printed, record = run("networks", *options)
    graph, one, encoder = record["rows"]
    assert "the same batch size" in graph["compact_error"]
    for row in (one, encoder):
        errors = [row[key] for key in row if key.endswith("_error")]
        assert errors == [None] * 6
    for row in (one, encoder):
        assert not row["uses_torch"]
        assert row["on_torch"] == {}
    assert encoder["compact"]["before"]["mult_adds"] == encoder["profile"]["mult_adds"]
    assert encoder["compact"]["after"]["parameters"] <= encoder["compact"]["before"]["parameters"]
    assert encoder["ratio"] > 0
    assert "× PyTorch's speed" in printed
    reasons: list[str] = []
    lines = [networks._line(row, reasons) for row in record["rows"]]
    assert lines[2].startswith("| nn.TransformerEncoder, 4 layers × 256 | 100 % | 100 % | 100 % | yes | yes | yes |")
    assert len({line.count("|") for line in lines}) == 1
    assert reasons == [graph["compact_error"]]
    assert lines[0].startswith("| graph network, 100 nodes | no (1) |")


def test_history_benchmark(run: RunBenchmark) -> None:
    text, record = run("history", "--pairs=2", "--disturbed=9")
    assert [row["every"] for row in record["rows"]] == [8, 1]
    for row in record["rows"]:
        assert (row["recipe"], row["captured"], row["steps"]) == ("digits/static-dnw", False, 14)
        assert all(taken["n"] == 2 and taken["median_s"] > 0 for taken in row["times"].values())
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        without = 1e3 * row["times"]["without"]["median_s"]
        assert f"a record every {row['every']}: without {without:.1f} ms" in text
    assert record["rows"][1]["inside"] > 3 * record["rows"][0]["inside"] > 0


@pytest.mark.parametrize("name", ["history-cpu", "history-h200"])
def test_recording_costs_less_than_one_percent(name: str) -> None:
    path = ROOT / "results" / "benchmarks" / f"{name}.json"
    if not path.exists():
        pytest.skip(f"no {name}.json yet")
    row, *often = json.loads(path.read_text())["rows"]
    assert row["captured"] == (name == "history-h200")
    if name == "history-cpu":  # on a GPU, the host records while the device computes
        assert row["inside"] < 0.01
    if often:  # a record after every step, whose cost exceeds the noise
        (each,) = often
        assert each["every"] == 1
        assert (each["ratio_high"] - 1) / row["every"] < 0.01
    else:
        assert row["ratio_high"] < 1.01


def test_agreement_benchmark_compares_rows_of_the_paper(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((80.0, 81.0, 82.0)):
        results.write(make("table1/static-dnw", seed=seed, accuracy=accuracy, best=accuracy + 1), tmp_path)
    results.write(make("table2/dnw", seed=0, accuracy=89.0), tmp_path)
    results.write(make("table2/expander", seed=0, accuracy=88.0), tmp_path)  # not a row of the paper
    agreement = runpy.run_path(str(ROOT / "benchmarks" / "agreement.py"))
    rows = agreement["compared"](tmp_path)
    assert [row.recipe for row in rows] == ["table1/static-dnw", "table2/dnw"]
    assert agreement["table"](tmp_path).splitlines()[2:4] == [
        "| `table1/static-dnw` | 80.9 ± 0.6 % | 81.0 ± 1.0 % | 82.0 ± 1.0 % | both | 3 |",
        "| `table2/dnw` | 89.7 ± 0.2 % | 89.0 % |  |  | 1† |",
    ]
    agreement["draw"](rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000
    assert agreement["compared"](tmp_path / "none") == []


def test_growth_benchmark_collects_results(tmp_path: Path) -> None:
    """Every direction has four sizes, one of them Table 1's network; only runs that were alone have a time."""
    for place, recipe in enumerate(recipes.table("growth")):
        result = make(recipe.name, seed=0, accuracy=70.0 + place)
        others = 1 if recipe.name == "growth/nodes-192" else 0
        results.write(replace(result, steps=1000, train_s=1.0 + place, most_others=others), tmp_path)
    results.write(make("table1/static-dnw", seed=1, accuracy=72.0), tmp_path)  # does not say whether it was alone
    growth = runpy.run_path(str(ROOT / "benchmarks" / "growth.py"))
    found = growth["measured"](tmp_path)
    centre = (71.0, pytest.approx(2**0.5), 1.0)
    assert found == {
        "nodes": [(192, 71.0, 0.0, None), (384, 72.0, 0.0, 3.0), (768, *centre), (1536, 73.0, 0.0, 4.0)],
        "edges": [(8000, 74.0, 0.0, 5.0), (16000, 75.0, 0.0, 6.0), (32000, *centre), (64000, 76.0, 0.0, 7.0)],
        "blocks": [(2, 77.0, 0.0, 8.0), (4, *centre), (8, 78.0, 0.0, 9.0), (16, 79.0, 0.0, 10.0)],
    }
    growth["draw"](found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000
    assert growth["measured"](tmp_path / "none") == {"nodes": [], "edges": [], "blocks": []}


@pytest.mark.parametrize("recipe", recipes.table("growth"), ids=lambda recipe: recipe.name)
def test_growth_recipes_have_the_sizes_of_their_names(recipe: recipes.Recipe) -> None:
    options = recipe.settings.model.options
    graph = models.get("tiny_static", rule="dnw", **options).graph
    axis, _, number = recipe.name.rpartition("/")[2].partition("-")
    blocks, each = options.get("blocks", 4), options.get("block_nodes", 192)
    sizes = {"nodes": 768, "edges": 32_000, "blocks": 4}
    if recipe.name.startswith("growth/"):
        sizes[axis] = int(number)
    assert (blocks * each, int(graph.real().sum()), blocks) == (sizes["nodes"], sizes["edges"], sizes["blocks"])
    assert graph.topology.nodes == 32 + sizes["nodes"] + 100
    centre = recipes.get("table1/static-dnw").settings
    assert replace(recipe.settings, model=centre.model) == centre, "all else is as in Table 1"


def test_density_benchmark_collects_results(tmp_path: Path) -> None:
    for row, accuracies in {"dense": (94.0,), "dnw-10": (93.0, 94.0), "dnw-2": (90.0,), "random-10": (91.0,)}.items():
        for seed, accuracy in enumerate(accuracies):
            results.write(make(f"resnet/{row}", seed=seed, accuracy=accuracy), tmp_path)
    results.write(make("ste/resnet-soft_threshold-2", seed=0, accuracy=92.0), tmp_path)
    results.write(make("ste/resnet-soft_threshold_k-2", seed=0, accuracy=85.0), tmp_path)  # a variant: ignored
    density = runpy.run_path(str(ROOT / "benchmarks" / "density.py"))
    found = density["measured"](tmp_path)
    assert found == {
        "dense": [(100, 94.0, 0.0, 1)],
        "dnw": [(2, 90.0, 0.0, 1), (10, 93.5, pytest.approx(0.5**0.5), 2)],
        "random": [(10, 91.0, 0.0, 1)],
        "soft_threshold": [(2, 92.0, 0.0, 1)],
    }
    density["draw"](found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000
    assert density["measured"](tmp_path / "none") == {}
