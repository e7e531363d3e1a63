"""Training on text: every recipe on a tiny network, AdamW, metrics in results and logs, resuming, generating."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from breaking import BreakError, Heard, Stops, same_runs
from commands import call

from wirings import WiringError, rules
from wirings.models.gpt import GPT
from wirings.train import generate as generation
from wirings.train import recipes, results
from wirings.train import saved_runs as runs
from wirings.train import typed_dataclasses as typed
from wirings.train.build import build
from wirings.train.data.metrics import ACCURACY, BITS_PER_BYTE, NATS, metric_of
from wirings.train.distributed import ProcessContext
from wirings.train.run import checkpoint, loop
from wirings.train.run.optimizer import make_optimizer, plain_name
from wirings.train.settings import Settings, from_mapping, to_mapping, with_overrides
from wirings.train.tables import by_rule

TINY = ["model.options.layers=1", "model.options.heads=2", "model.options.width=32", "model.options.context=8"]
TINY += ["batch=4", "steps=5", "schedule.warmup_steps=2"]
NAMES = [row.name for table in ("text", "shakespeare") for row in recipes.table(table)]
SENTENCE = "the quick brown fox jumps over the lazy dog. "
CPU = ProcessContext(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "input.txt").write_text(SENTENCE * 20)
    return folder


def tiny(name: str, corpus: Path, *changes: str) -> Settings:
    options = "{context: 8, epoch_steps: 2%s}" % (", sha256: null" if name.startswith("shakespeare") else "")
    more = [f"data.directory={corpus}", f"data.options={options}"]
    return with_overrides(recipes.get(name).settings, [*TINY, *more, *changes])[0]


def train(name: str, out: Path, corpus: Path, *changes: str, **more: Any) -> results.Result | None:
    return loop.train(name, tiny(name, corpus, *changes), out, device="cpu", **more)


def lines(out: Path) -> list[dict[str, str]]:
    with open(out / "log.csv") as file:
        return list(csv.DictReader(file))


def test_recipes_follow_their_names() -> None:
    for table in (name for name in by_rule.TABLES if name != "pruned"):  # which starts from recipes of another table
        base = recipes.get(f"{table}/dense").settings
        for row in recipes.table(table):
            kind, _, percent = row.name.partition("/")[2].partition("-")
            s = row.settings
            rule = rules.get(s.rule.name, **s.rule.options)
            structure = s.model.options.get("structure", "free")
            own = ["nm", f"{rule.name}_{structure.replace(':', 'of')}"] if structure != "free" else []
            assert kind in (rule.name, f"{rule.name}_cubic", f"{rule.name}_global", f"{rule.name}_small", *own)
            if rule.name == "dense":
                assert "density" not in s.model.options
            elif ":" in structure:
                assert structure == {"nm": "3:32"}.get(kind, "2:4")
            else:
                assert s.model.options["density"] == int(percent) / 100
            decay = 0.0 if kind == "top_kast" and base.optimizer.weight_decay else None
            assert replace(s.optimizer, lr=base.optimizer.lr) == replace(base.optimizer, weight_decay_edges=decay)
            assert replace(s, rule=base.rule, model=base.model, optimizer=base.optimizer) == base, "trained alike"


@pytest.mark.parametrize(("table", "weights"), [("text", 18_874_368), ("shakespeare", 10_616_832)])
def test_small_networks_have_as_many_weights_as_a_density(table: str, weights: int) -> None:
    for name in ("dense", "dense_small-10", "dense_small-5"):
        options = recipes.get(f"{table}/{name}").settings.model.options
        percent = int(name.partition("-")[2] or 100)
        assert 12 * options["layers"] * options["width"] ** 2 == pytest.approx(weights * percent / 100, rel=0.05)


@pytest.mark.filterwarnings("ignore:rule .* will not change the wiring")  # in so few steps
@pytest.mark.filterwarnings("ignore:share=.global. leaves no edges")  # in a network as small as this
@pytest.mark.filterwarnings("ignore:structure='32x32' leaves")  # likewise
@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("-5")])
def test_recipe_trains_five_steps(name: str, corpus: Path, tmp_path: Path) -> None:
    log = Heard()
    result = train(name, tmp_path, corpus, log=log)
    assert result is not None
    assert (result.steps, result.epochs) == (5, 3), "the last epoch ends early"
    assert [line["steps"] for line in lines(tmp_path)] == ["2", "4", "5"]
    assert [line["tokens"] for line in lines(tmp_path)] == ["64", "64", "32"]
    assert log.said[0].startswith("fast: the step cannot be captured (there is no CUDA device)")
    metric = NATS if name.startswith("shakespeare") else BITS_PER_BYTE
    assert (result.metric, result.higher_is_better, result.measured_by) == (metric.name, False, metric)
    assert result.test_loss is not None
    assert result.score == pytest.approx(result.test_loss / (math.log(2) if metric is BITS_PER_BYTE else 1))
    assert float(lines(tmp_path)[-1][metric.name]) == result.value
    assert result.best_value == min(float(line[metric.name]) for line in lines(tmp_path))
    assert result.best_accuracy is None
    assert results.read(tmp_path / "result.json") == result


def test_the_gradient_of_hallucinated_blocks_is_an_option(corpus: Path, tmp_path: Path) -> None:
    """It changes what is trained, and a run that was stopped continues in step with it."""
    losses = []
    for number, every in enumerate((1, 2, 2)):
        out, changes = tmp_path / str(number), (f"model.options.gradient_every={every}", "steps=6")
        if number == 2:
            assert train("text/dnw_16x16-10", out, corpus, *changes, max_minutes=0) is None
        result = train("text/dnw_16x16-10", out, corpus, *changes, **({"resume": True} if number == 2 else {}))
        assert result is not None
        losses.append(result.test_loss)
    assert losses[0] != losses[1] == losses[2]


@pytest.mark.parametrize("five", [name for name in NAMES if name.endswith("-5") and "small" not in name])
def test_rows_at_five_percent_differ_from_ten_in_density_and_rate(five: str) -> None:
    ten, row = recipes.get(five.replace("-5", "-10")).settings, recipes.get(five).settings
    options = {**ten.model.options, "density": 0.05}
    optimizer = replace(ten.optimizer, lr=row.optimizer.lr)
    assert row == replace(ten, model=replace(ten.model, options=options), optimizer=optimizer)


def test_first_batches_are_learned(corpus: Path, tmp_path: Path) -> None:
    result = train("text/dnw-10", tmp_path, corpus, "steps=60", "optimizer.lr=1e-2", "precision=fp32")
    assert result is not None
    assert result.score < 4.5, "random bytes have 8 bits, those of the sentence 4.4"
    assert float(lines(tmp_path)[0]["lr"]) == pytest.approx(1e-2, rel=1e-6), "after two steps of warm-up"
    assert float(lines(tmp_path)[-1]["lr"]) == pytest.approx(1e-3, rel=0.05), "the floor of the cosine"


@pytest.mark.filterwarnings("ignore:rule .* will not change the wiring")  # in so few steps
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("text/dnw_cubic-10", []),
        ("text/rigl-10", ["rule.options.every=2"]),
        ("shakespeare/dense", ["model.options.dropout=0.2", "ema=0.9"]),
        ("shakespeare/str-10", []),
    ],
)
def test_resumes_bit_for_bit(name: str, changes: list[str], corpus: Path, tmp_path: Path) -> None:
    changes = [*changes, "checkpoint_every=1", "history_every=1"]
    train(name, tmp_path / "whole", corpus, *changes)
    for after in (2, 1, 2):
        with pytest.raises(BreakError):
            train(name, tmp_path / "often", corpus, *changes, resume=True, log=Stops(after))
    train(name, tmp_path / "often", corpus, *changes, resume=True)
    if name == "shakespeare/dense":
        (tmp_path / "whole" / "history.wirings").touch()
        (tmp_path / "often" / "history.wirings").touch()
    same_runs(tmp_path / "whole", tmp_path / "often")


def test_notices_text_that_changed(tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "run"
    corpus.mkdir()
    (corpus / "input.txt").write_text(SENTENCE * 20)
    result = train("text/dense", out, corpus)
    assert result is not None
    assert checkpoint.read(out / "last.safetensors")[1]["data_md5"] == result.data_md5
    runs.measure_by(out, device="cpu")
    (corpus / "input.txt").write_text(SENTENCE * 19 + SENTENCE[::-1])
    with pytest.raises(WiringError, match=r"last\.safetensors was trained on other data: the checksum of text has cha"):
        train("text/dense", out, corpus, resume=True)
    with pytest.warns(UserWarning, match="run was trained on other data: .* does not compare with the run's result"):
        runs.measure_by(out, device="cpu")
    tensors, about = checkpoint.read(out / "last.safetensors")
    del about["data_md5"]  # as in checkpoints of earlier versions
    checkpoint.write_tensors(out / "last.safetensors", tensors, about)
    assert train("text/dense", out, corpus, resume=True) == result
    runs.measure_by(out, device="cpu")


def test_rejects_checkpoints_that_lack_a_part_of_adamw(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(BreakError):
        train("text/dense", tmp_path, corpus, "checkpoint_epochs=1", log=Stops(3))
    tensors, about = checkpoint.read(tmp_path / "last.safetensors")
    assert tensors["optimizer.0.step"].item() == 2
    del tensors["optimizer.0.exp_avg_sq"]
    checkpoint.write_tensors(tmp_path / "last.safetensors", tensors, about)
    with pytest.raises(WiringError, match="the optimizer lacks 'exp_avg_sq' of a parameter"):
        train("text/dense", tmp_path, corpus, "checkpoint_epochs=1", resume=True)


def test_adamw_decays_matrices_only(corpus: Path) -> None:
    settings = tiny("text/dnw-10", corpus, "optimizer.weight_decay_edges=0.3", "model.options.bias=true")
    model, wiring = build(settings, 256, CPU)
    optimizer = make_optimizer(model, wiring, settings, CPU.device)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert all((group["betas"], group["eps"]) == ((0.9, 0.95), 1e-8) for group in optimizer.param_groups)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    named = {plain_name(name): decay[id(parameter)] for name, parameter in model.named_parameters()}
    assert {name for name, value in named.items() if value == 0.1} == {"tokens.weight", "positions.weight"}
    assert {name for name, value in named.items() if value == 0.0} == {
        name for name in named if name.endswith("bias") or "norm" in name
    }
    assert sum(value == 0.3 for value in named.values()) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.options.context=4"], r"model\.options\.context = 4 is smaller than .* = 8\. Make it"),
        (["model.options.classes=9"], r"knows fewer tokens than data set 'text' has, which are 256. Fix model.options"),
    ],
)
def test_rejects_models_that_do_not_fit_the_text(
    changes: list[str], message: str, corpus: Path, tmp_path: Path
) -> None:
    settings = tiny("text/dense", corpus, *changes)
    with pytest.raises(WiringError, match=message):
        loop.train("text/dense", settings, tmp_path / "run", device="cpu")
    assert not list((tmp_path / "run").glob("*.safetensors"))


def test_metrics() -> None:
    assert metric_of({"loss": 1, "accuracy": 2, "nats": 1}) is NATS
    assert metric_of({"loss": 1, "accuracy": 2}) is ACCURACY
    assert ACCURACY.better(2, 1)
    assert BITS_PER_BYTE.better(1, 2)
    assert not NATS.better(1, 1)
    assert NATS.format(1.46971) + NATS.remark(1.46971) == "1.4697 nats (perplexity 4.35)"


def test_committed_results_keep_their_format(tmp_path: Path) -> None:
    committed = sorted(Path(__file__).parents[2].glob("results/*/*/seed0.json"))
    assert committed
    for path in committed:
        result = results.read(path)
        of_text = result.recipe.startswith("text/")
        expected = (result.value, BITS_PER_BYTE) if of_text else (result.accuracy, ACCURACY)
        assert (result.score, result.measured_by) == expected
        results.write_json(tmp_path / "again.json", result)
        assert json.loads((tmp_path / "again.json").read_text()) == json.loads(path.read_text())
        if result.recipe in recipes.names() and not result.overrides:  # settings that came later have their defaults
            now, then = to_mapping(recipes.get(result.recipe).settings), result.settings
            if then["rule"]["name"] == "nm":  # a structure since
                then = to_mapping(from_mapping(then))
            # Where a text lay is not part of its recipe.
            keys = [key for key in typed.leaves(Settings) if not (of_text and key == "data.directory")]
            assert {key: typed.at(now, key) for key in keys if typed.at(then, key)} == {
                key: value for key in keys if (value := typed.at(then, key))
            }
    result = results.read(next(path for path in committed if "text" not in path.parts))
    with pytest.raises(WiringError, match="metric must be one of bits_per_byte, nats"):
        replace(result, metric="bites", value=1.0)
    with pytest.raises(WiringError, match="metric and value must be given together"):
        replace(result, metric="nats")


def test_commands(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    name = "shakespeare/dnw-10"
    options = "data.options={context: 8, epoch_steps: 2, sha256: null}"
    changes = [text for change in [*TINY, options] for text in ("--set", change)]
    said = call("train", name, "--data", corpus, "--device", "cpu", "--out", "run", *changes)
    result = results.read(tmp_path / "run" / "result.json")
    assert f", test {result.value:.4f} nats (perplexity {math.exp(result.score):.2f}), lr " in said
    assert "tokens/s" in said
    assert f"{name}, seed 0: {result.value:.4f} nats after" in said
    again = call("eval", "run", "--device", "cpu")
    assert again.startswith(f"run: {result.value:.4f} nats (perplexity ")
    assert json.loads(call("eval", "run", "--json"))["nats"] == pytest.approx(result.value)
    first = call("generate", "run", "--prompt", "the q", "--length", "20", "--device", "cpu")
    assert first.startswith("the q")
    assert len(first) == len("the q") + 20 + 1
    assert first == call("generate", "run", "--prompt", "the q", "--length", "20")
    assert first != call("generate", "run", "--prompt", "the q", "--length", "20", "--seed", "1")
    with pytest.raises(WiringError, match="Use `wirings generate`"):
        call("predict", "run", corpus / "input.txt")
    assert "largest difference of the outputs" in call("compact", "run", "--out", "small.pt2")
    small = torch.export.load("small.pt2").module()
    tokens = torch.randint(28, (3, 8))
    torch.testing.assert_close(small(tokens), runs.open_run("run", device="cpu").model(tokens))
    with pytest.raises(WiringError, match="was trained on tokens, which have no image size"):
        call("compact", "run", "--image-size", "8")
    assert name in call("recipes", "shakespeare")
    assert "5,000 steps" in call("recipes", "shakespeare/dense")


def test_generates_text(corpus: Path, tmp_path: Path) -> None:
    train("text/dense", tmp_path / "bytes", corpus)
    train("shakespeare/dense", tmp_path / "characters", corpus)

    def text(run: str, prompt: str = "the ", **more: Any) -> str:
        return "".join(generation.generate(tmp_path / run, prompt, **{"length": 30, "device": "cpu", **more}))

    assert len(text("characters")) == 30
    assert set(text("characters")) <= set(SENTENCE)
    greedy = text("characters", temperature=0)
    assert greedy == text("characters", top_k=1, seed=3)
    model, *_ = runs.open_run(tmp_path / "characters", device="cpu")
    letters = sorted(set(SENTENCE))
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(torch.tensor([[letters.index(letter) for letter in "the "]]))
    assert greedy[0] == letters[int(scores[0, -1].argmax())]
    assert text("bytes", "ü", seed=1) == text("bytes", "ü", seed=1) != text("bytes", "ü", seed=2)
    for run, prompt, more, message in (
        ("characters", "ü", {}, r"the prompt has the character 'ü', which was not in the text"),
        ("characters", "the quick", {}, r"the prompt has 9 tokens, but the run was trained with a context of 8\."),
        ("bytes", "üüüüü", {}, r"the prompt has 10 tokens"),
        ("bytes", "", {}, "the prompt is empty"),
        ("bytes", "a", {"length": 0}, "length must be a whole number, at least 1, got 0"),
        ("bytes", "a", {"top_k": 0}, "top_k must be a whole number, at least 1, got 0"),
        ("bytes", "a", {"temperature": -1.0}, "temperature must be a number of at least 0, got -1"),
    ):
        with pytest.raises(WiringError, match=message):
            text(run, prompt, **more)
    with pytest.raises(WiringError, match=r"was trained on CIFAR-10, not on text\. Use `wirings predict`\."):
        generation.generate("table1/static-dnw", device="cpu")


def test_generates_within_the_context_of_the_training(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train("text/dense", tmp_path, corpus, "model.options.context=12")
    longest = 0
    forward = GPT.forward

    def spy(self: GPT, tokens: torch.Tensor) -> torch.Tensor:
        nonlocal longest
        longest = max(longest, tokens.shape[1])
        return forward(self, tokens)

    monkeypatch.setattr(GPT, "forward", spy)
    assert list(generation.generate(tmp_path, "the ", length=20, device="cpu"))
    assert longest == 8, "positions 9 to 12 were not trained"
    with pytest.raises(WiringError, match="the prompt has 9 tokens, but the run was trained with a context of 8"):
        generation.generate(tmp_path, "the quick", device="cpu")


def test_the_context_of_a_model_is_that_of_its_data(corpus: Path) -> None:
    settings = tiny("text/dense", corpus)
    options = {key: value for key, value in settings.model.options.items() if key != "context"}
    left_out = replace(settings, model=replace(settings.model, options=options))
    assert build(left_out, 256, CPU)[0].input_shape == (8,)
    usual = replace(left_out, data=replace(settings.data, options={}))
    assert build(usual, 256, CPU)[0].input_shape == (256,), "the data's own default"


def test_a_tiny_temperature_takes_the_most_likely_token() -> None:
    logits = torch.tensor([30.0, 50.0, -20.0])
    for temperature in (1e-50, 1e-40, 1e-6):
        random = torch.Generator().manual_seed(0)
        drawn = generation._draw(lambda _: logits, [0], 4, CPU.device, 3, temperature, None, random)
        assert list(drawn) == [1, 1, 1]


def test_bytes_are_decoded_as_they_come() -> None:
    vocabulary = generation.Vocabulary(None)
    tokens = vocabulary.encode("aü\n")
    assert tokens == [97, 0xC3, 0xBC, 10]
    assert list(vocabulary.decode(iter([*tokens, 0xC3]))) == ["a", "ü", "\n", "\ufffd"]


def test_table_of_text(corpus: Path, tmp_path: Path) -> None:
    result = train("text/dense", tmp_path / "run", corpus)
    assert result is not None
    for name, value in (("text/dense", 1.0), ("text/dnw-10", 1.25)):
        for seed in (0, 1):
            settings = to_mapping(recipes.get(name).settings) | {"seed": seed}
            mine = replace(result, recipe=name, seed=seed, value=value + seed / 10, settings=settings, overrides={})
            results.write(mine, tmp_path / "results")
    changed = replace(result, recipe="text/dnw-10", seed=2, overrides={"steps": 5})
    results.write(changed, tmp_path / "results")
    rows = {row.recipe: row for row in by_rule.table("text", tmp_path / "results")}
    assert list(rows) == [recipe.name for recipe in recipes.table("text")]
    row = rows["text/dnw-10"]
    assert (row.network, row.rule, row.density, row.lr) == ("gpt 6 × 512", "dnw", 0.1, 4e-3)
    assert row.difference == pytest.approx(0.25)
    assert (row.measured.mean, row.measured.metric, row.measured.higher_is_better) == (
        pytest.approx(1.3),
        "bits_per_byte",
        False,
    )
    assert rows["text/dense"].difference is None
    assert rows["text/nm-10"].density == 3 / 32
    assert (rows["text/dnw_32x32-20"].rule, rows["text/dnw_32x32-20"].density) == ("dnw, 32x32", 0.2)
    assert (rows["text/rigl_2of4-50"].rule, rows["text/rigl_2of4-50"].density) == ("rigl, 2:4", 0.5)
    printed = call("table", "text", "--results", tmp_path / "results")
    assert "1.3000 ± 0.0707" in printed
    assert "+0.2500" in printed
    assert "Lower is better." in printed
    assert "text/dnw-10: 1 more with settings that differ from the recipe, which do not count." in printed
    assert "| `text/dense` | gpt 6 × 512 |" in call("table", "text", "--results", tmp_path / "results", "--markdown")
    as_json = json.loads(call("table", "text", "--results", tmp_path / "results", "--json"))
    assert as_json[0]["measured"]["metric"] == "bits_per_byte"
