"""The training loop: every recipe, every setting, checkpoints and errors."""

import csv
import errno
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from breaking import BreakError, Heard, Stops
from soak import SOAK
from torch import Tensor
from vision import MISSING

from wirings import WiringError, rules
from wirings.models import mobilenet, registry
from wirings.train import phases, recipes, results
from wirings.train import saved_runs as runs
from wirings.train.build import build
from wirings.train.distributed import ProcessContext
from wirings.train.run import checkpoint, loop
from wirings.train.run.captured_step import reset
from wirings.train.run.log import ConsoleLog
from wirings.train.run.optimizer import make_optimizer, plain_name
from wirings.train.run.step import TrainingStep
from wirings.train.settings import Settings, with_overrides
from wirings.utils import files

RECIPE = "digits/static-dnw"
TINY = ["data.name=synthetic", "data.options={shape: [1, 8, 8], examples: 50, test_examples: 40}", "batch=20"]
TINY += ["optimizer.lr=0.3", "optimizer.momentum=0.9", "schedule.kind=cosine", "clip=1"]
CPU = ProcessContext(0, 1, torch.device("cpu"))
NARROW_STAGES = tuple(  # all but the stem, which the first of them follows
    stage._replace(before=stage.before if i == 0 else stage.before // 4, channels=stage.channels // 4)
    for i, stage in enumerate(mobilenet.STAGES)
)


def tiny(*changes: str) -> Settings:
    return with_overrides(recipes.get(RECIPE).settings, [*TINY, "epochs=2", *changes])[0]


def run(out: Path, *changes: str, **more: Any) -> results.Result:
    result = loop.train(RECIPE, tiny(*changes), out, device="cpu", **more)
    assert result is not None
    return result


def weights(out: Path, kind: str = "model.") -> dict[str, Tensor]:
    file = safetensors.torch.load_file(out / "last.safetensors")
    return {name.removeprefix(kind): value for name, value in file.items() if name.startswith(kind)}


def lines(out: Path) -> list[dict[str, str]]:
    with open(out / "log.csv") as file:
        return list(csv.DictReader(file))


def new_model(settings: Settings) -> torch.nn.Module:
    torch.manual_seed(settings.seed)
    return build(settings, 10, CPU)[0]


class Attends(torch.nn.Module):
    """A user's model in which rows of pixels are tokens; attention is a function, not a module."""

    input_shape = (1, 8, 8)

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.mix, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(x).chunk(3, -1)
        return self.out(torch.nn.functional.scaled_dot_product_attention(query, key, value).flatten(1))


def test_counts_attention_of_a_registered_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))

    @registry.register
    def attends(classes: int = 10) -> torch.nn.Module:
        return Attends(classes)

    result = run(tmp_path, "model.name=attends", "model.options={density: 0.25}")
    assert result.edges == 24 * 8 // 4 + 64 * 10 // 4
    assert result.mult_adds == 8 * 24 * 8 // 4 + 64 * 10 // 4 + 2 * 8 * 8 * 8


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "plain"
    run(out)
    return out


BUDGET = ("model.options.density", "model.options.k", "model.options.mult_adds")


def trained_sibling(name: str) -> tuple[str, tuple[str, ...]] | None:
    """The recipe trained in place of this one, and the settings in which they differ; None if it is trained itself.

    The rows of these families are one network at several densities, or with several probabilities of targeted dropout.
    Training all of them would run the same code again, for minutes: ResNet-50 is large, and a regular dropout ranks the
    edges of thousands of nodes. Rows that differ in anything else are trained, with ``WIRINGS_SOAK=1`` all of them.
    """
    family = name.rpartition("-")[0]
    if family in ("table4/all", "table4/first_dense", "table4/sparse_momentum") or family.startswith(
        ("resnet/", "ste/resnet-")
    ):
        trained, keys = f"{family}-10", BUDGET[:1]
        if trained not in recipes.names():  # with fewer weights, soft thresholds are shrunk less
            trained, keys = f"{family}-5", (*BUDGET, "rule.options.factor")
    elif family.startswith("cifar100/"):
        trained, keys = f"{family}-5", (*BUDGET, "rule.options.factor")
    elif family == "appendix_b/regular":
        trained, keys = f"{family}-gamma", ("rule.options.rho",)
    else:
        return None
    # One sets an option of its rule as well, the other is dense: they differ in more than the density.
    alone = name in (trained, "ste/resnet-soft_threshold-2", "table4/sparse_momentum-100")
    return None if SOAK or alone else (trained, keys)


def without(settings: Settings, keys: Sequence[str]) -> Settings:
    """Settings without some options of the model and of the rule."""
    model, rule = (
        {key: value for key, value in options.items() if f"{kind}.options.{key}" not in keys}
        for kind, options in (("model", settings.model.options), ("rule", settings.rule.options))
    )
    return replace(settings, model=replace(settings.model, options=model), rule=replace(settings.rule, options=rule))


ELSEWHERE = ("text/", "shakespeare/", "translate/", "vit/")
"""Recipes that other tests train, since they need other data or smaller networks."""
SIBLINGS = {name: trained_sibling(name) for name in recipes.names() if not name.startswith(ELSEWHERE)}


@pytest.mark.parametrize("name", [name for name, sibling in SIBLINGS.items() if sibling is not None])
def test_other_recipes_differ_from_a_trained_one_in_numbers(name: str) -> None:
    """With `test_recipe_trains_two_steps`, this covers every recipe: others differ from a trained one in numbers."""
    sibling = SIBLINGS[name]
    assert sibling is not None
    trained, keys = sibling
    assert SIBLINGS[trained] is None
    settings, number = recipes.get(name).settings, float(name.rpartition("-")[2])
    assert without(settings, keys) == without(recipes.get(trained).settings, keys)
    if keys == ("rule.options.rho",):
        assert settings.rule.options["rho"] == number
    elif settings.model.options.get("k") is None:
        assert settings.model.options["density"] == number / 100
    assert rules.get(settings.rule.name, **settings.rule.options).name == settings.rule.name


@pytest.mark.filterwarnings("ignore:rule .* will not change the wiring")  # in so few steps
@pytest.mark.filterwarnings("ignore:share=.* leaves no edges")  # in a narrow network
@pytest.mark.parametrize("name", [name for name, sibling in SIBLINGS.items() if sibling is None])
def test_recipe_trains_two_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = recipes.get(name).settings
    shape = [1, 8, 8] if settings.data.name == "digits" else [3, 32, 32]
    size = 8 if settings.data.name == "digits" else 2
    data = f"data.options={{shape: {shape}, examples: {2 * size}, test_examples: 2}}"
    changes = ["data.name=synthetic", data, f"batch={size}", "epochs=1", "schedule.milestones=[]"]
    changes.append("schedule.warmup_epochs=0")
    if settings.schedule.kind == "multistep":
        changes.append("schedule.kind=constant")
    if settings.precision == "fp16":
        changes.append("precision=fp32")
    large = "image_size" in settings.model.options or settings.model.name.startswith("resnet")
    if "image_size" in settings.model.options:
        changes += ["data.image_size=null", "model.options.image_size=32"]
    whole = SOAK or settings.start.recipe is not None  # both phases have the same width
    if settings.model.name.startswith("resnet") and not whole:  # test_resnet_recipes.py trains a whole ResNet-50
        changes.append(f"model.options.width={0.5 if 'structure' in settings.model.options else 0.25}")  # groups of 32
    if not (SOAK or name == "table2/dnw"):  # a quarter of the channels, which is a sixteenth of the edges
        monkeypatch.setattr(mobilenet, "STAGES", NARROW_STAGES)
    if settings.model.name in ("mobilenetv2", "shufflenetv2", "mnasnet") and MISSING is not None:
        pytest.skip(MISSING)
    small, overrides = with_overrides(settings, changes)
    log = Heard()
    result = phases.train(name, small, tmp_path / "run", device="cpu", overrides=overrides, log=log)
    assert result is not None
    assert (result.recipe, result.steps, result.epochs) == (name, 2, 1)
    # After two steps, the running statistics of a deep network are still off, so evaluation may overflow.
    assert result.test_loss is not None or large
    if settings.start.recipe is not None:
        first = results.read(tmp_path / settings.start.recipe / "seed0" / "result.json")
        assert (first.recipe, first.steps, first.epochs) == (settings.start.recipe, 2, 1)
    assert settings.fast == any("cannot be captured (there is no CUDA device)" in text for text in log.said)


def test_files_of_a_run(plain: Path) -> None:
    assert {path.name for path in plain.iterdir()} == {
        "settings.yaml", "log.csv", "initial.safetensors", "last.safetensors", "best.safetensors", "result.json",
        "history.wirings",
    }  # fmt: skip
    name, settings, overrides = results.load_settings(plain / "settings.yaml")
    assert (name, settings, overrides) == (RECIPE, tiny(), {})
    table, result = lines(plain), results.read(plain / "result.json")
    assert [(line["epoch"], line["steps"], line["images"]) for line in table] == [("1", "3", "50"), ("2", "6", "50")]
    assert float(table[-1]["accuracy"]) == result.accuracy
    assert float(table[-1]["loss"]) == result.test_loss
    assert (result.recipe, result.seed, result.steps, result.edges) == (RECIPE, 0, 6, 200)
    assert result.wall_s >= result.train_s == float(table[-1]["seconds"]) > 0
    assert runs.measure(plain, device="cpu") == (result.test_loss, result.accuracy, result.top5)
    best = max(line["accuracy"] for line in table)
    assert runs.measure(plain, best=True, device="cpu")[1] == float(best) == result.best_accuracy


def test_runs_are_reproducible_and_depend_on_the_seed(plain: Path, tmp_path: Path) -> None:
    run(tmp_path / "same")
    run(tmp_path / "other", "seed=1")
    same, other, before = weights(tmp_path / "same"), weights(tmp_path / "other"), weights(plain)
    assert all(torch.equal(same[name], value) for name, value in before.items())
    assert not torch.equal(other["graph.weight"], before["graph.weight"])


@pytest.mark.parametrize(
    "change",
    [
        "label_smoothing=0.2",
        "clip=0.01",
        "norm_scales=uniform",
        "optimizer.nesterov=true",
        "optimizer.momentum=0.5",
        "optimizer.weight_decay=0.1",
        "optimizer.weight_decay_edges=0.1",
        "optimizer.weight_decay_norms=false",
        "optimizer.no_decay=[head]",
        "optimizer.lr=0.1",
        "schedule.kind=constant",
        "precision=bf16",
        "rule.name=random",
        "model.options.edges=100",
        "data.augment=false",
        "batch=25",
    ],
)
def test_setting_changes_the_weights(change: str, plain: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", change)
    changed, before = weights(tmp_path / "run"), weights(plain)
    assert any(not torch.equal(changed[name], value) for name, value in before.items())
    assert all(value.isfinite().all() for value in changed.values())


@pytest.mark.parametrize("change", ["accumulate=3", "accumulate=20", "channels_last=true"])
def test_setting_does_not_change_the_weights(change: str, plain: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", change)
    changed, before = weights(tmp_path / "run"), weights(plain)
    for name, value in before.items():
        torch.testing.assert_close(changed[name], value, rtol=1e-3, atol=1e-5)
    for one, other in zip(lines(tmp_path / "run"), lines(plain), strict=True):
        assert float(one["train_loss"]) == pytest.approx(float(other["train_loss"]), rel=1e-5)
        assert one["images"] == other["images"]


def test_accumulate_and_channels_last_reach_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    forward = torch.nn.Conv2d.forward

    def spy(self: torch.nn.Conv2d, x: Tensor) -> Tensor:
        if self.training:
            seen.append((len(x), self.weight.is_contiguous(memory_format=torch.channels_last)))
        return forward(self, x)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", spy)
    run(tmp_path / "run", "accumulate=3", "channels_last=true", "epochs=1")
    assert [size for size, _ in seen] == [7, 7, 6, 7, 7, 6, 4, 4, 2]
    assert all(last for _, last in seen)


def test_label_smoothing_affects_the_training_loss_only(tmp_path: Path) -> None:
    still = ["optimizer.lr=1e-30", "epochs=1"]  # no learning, so the scores are the same
    run(tmp_path / "sharp", *still)
    run(tmp_path / "smooth", *still, "label_smoothing=0.5")
    sharp, smooth = lines(tmp_path / "sharp")[0], lines(tmp_path / "smooth")[0]
    assert sharp["train_accuracy"] == smooth["train_accuracy"]
    assert sharp["train_loss"] != smooth["train_loss"]
    assert sharp["loss"] == smooth["loss"]  # the test loss is not smoothed


def test_clips_by_the_norm_of_the_whole_network(tmp_path: Path) -> None:
    bare = ["optimizer.lr=1", "optimizer.momentum=0", "optimizer.weight_decay=0", "schedule.kind=constant"]
    changes = [*bare, "epochs=1", "batch=50", "clip=0.01"]
    run(tmp_path / "run", *changes)
    settings = tiny(*changes)
    torch.manual_seed(settings.seed)
    model, wiring = build(settings, 10, CPU)
    assert wiring is not None
    real = wiring.masks()
    before, after = model.state_dict(), weights(tmp_path / "run")
    moved = {name: after[name] - value for name, value in before.items() if value.is_floating_point()}
    key = next(name for name in moved if name.startswith("graph") and moved[name].shape == real["weight"].shape)
    moved[key] = torch.where(real["weight"], moved[key], 0.0)
    assert moved["stem.weight"].norm() > 0
    assert torch.stack([change.norm() for change in moved.values()]).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_weight_decay_of_edges_norms_and_other_weights() -> None:
    settings = tiny(
        "optimizer.weight_decay=0.1", "optimizer.weight_decay_edges=0.2", "optimizer.weight_decay_norms=false"
    )
    model, wiring = build(settings, 10, CPU)
    assert wiring is not None
    optimizer = make_optimizer(model, wiring, settings, CPU.device)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    edges = {id(layer.weight) for layer in wiring.layers}
    assert len(decay) == len(list(model.parameters()))
    for parameter in model.parameters():
        expected = 0.2 if id(parameter) in edges else 0.0 if parameter.dim() <= 1 else 0.1
        assert decay[id(parameter)] == expected
    (group,) = make_optimizer(model, wiring, tiny("optimizer.weight_decay=0.1"), CPU.device).param_groups
    assert group["weight_decay"] == 0.1


@pytest.mark.parametrize("settings", ["optimizer.ham_beta=0.5", "optimizer.ham_alpha=100"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_ham_multiplies_matrices_and_edges(name: str, settings: str) -> None:
    moved = []
    for overrides in ([settings], []):
        made = tiny(f"optimizer.name={name}", *overrides)
        torch.manual_seed(0)
        model, wiring = build(made, 10, CPU)
        assert wiring is not None
        optimizer = make_optimizer(model, wiring, made, CPU.device)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        optimizer.step()
        moved.append({p: value.detach() for p, value in model.named_parameters()})
    edges = {name for name, p in model.named_parameters() if any(p is layer.weight for layer in wiring.layers)}
    for key, value in moved[0].items():
        assert torch.equal(value, moved[1][key]) != (value.dim() > 1 or key in edges), key


@pytest.mark.parametrize("name", ["table1/discrete-dnw", "table2/dnw", "table2/mobilenetv1-0.25"])
def test_norm_scales_setting(name: str) -> None:
    settings, _ = with_overrides(recipes.get(name).settings, ["norm_scales=uniform"])
    ones, drawn = (dict(new_model(s).named_parameters()) for s in (replace(settings, norm_scales="ones"), settings))
    scales = {key for key, value in ones.items() if value.eq(1).all()}  # only norms are initialised to 1
    values = torch.cat([drawn[key].detach() for key in scales])
    assert len(values) > 800
    assert 0 <= values.min() < 0.01
    assert 0.99 < values.max() <= 1
    assert abs(values.mean() - 0.5) < 0.05
    assert all(torch.equal(ones[key], drawn[key]) for key in ones.keys() - scales)


def test_no_decay_patterns() -> None:
    settings = tiny("optimizer.weight_decay=0.1", "optimizer.no_decay=['*.norm_bias', head, graph.weight]")
    model, wiring = build(settings, 10, CPU)
    optimizer = make_optimizer(model, wiring, settings, CPU.device)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    names = {plain_name(name): decay[id(p)] for name, p in model.named_parameters()}
    biases = {name for name in names if name.endswith("norm_bias")}
    assert {name for name, value in names.items() if value == 0} == {
        "graph.weight",
        "head.weight",
        "head.bias",
        *biases,
    }
    assert biases
    assert set(names.values()) == {0.0, 0.1}
    with pytest.raises(WiringError, match=r"optimizer\.no_decay: 'bn\*' matches no parameter of the model"):
        make_optimizer(model, wiring, tiny("optimizer.no_decay=['bn*']"), CPU.device)


def test_average_is_saved_and_evaluated(tmp_path: Path) -> None:
    changes = ["ema=0.75", "epochs=1", "batch=50"]
    result = run(tmp_path / "run", *changes)
    before, after = new_model(tiny(*changes)).state_dict(), weights(tmp_path / "run")
    average = weights(tmp_path / "run", "average.")
    assert average.keys() == after.keys() == before.keys()
    for name in ("stem.weight", "head.bias"):
        torch.testing.assert_close(average[name], 0.75 * before[name] + 0.25 * after[name])
        assert not torch.equal(average[name], after[name])
    assert runs.measure(tmp_path / "run", device="cpu") == (result.test_loss, result.accuracy, result.top5)
    run(tmp_path / "without", *changes[1:])
    assert results.read(tmp_path / "without" / "result.json").test_loss != result.test_loss


def test_half_precision_keeps_float32_weights(tmp_path: Path) -> None:
    run(tmp_path / "run", "precision=bf16")
    assert {value.dtype for value in weights(tmp_path / "run").values() if value.is_floating_point()} == {torch.float32}
    assert results.read(tmp_path / "run" / "result.json").precision == "bf16"


def test_evaluate_every(tmp_path: Path) -> None:
    run(tmp_path / "run", "epochs=3", "evaluate_every=2")
    assert [line["accuracy"] != "" for line in lines(tmp_path / "run")] == [False, True, True]


@pytest.mark.parametrize(
    ("changes", "factors"),
    [
        (["schedule.kind=constant"], [1, 1, 1]),
        (["schedule.kind=multistep", "schedule.milestones=[1, 2]", "schedule.factor=0.5"], [1, 0.5, 0.25]),
        (["schedule.per=epoch"], [1, 0.75, 0.25]),
        (["schedule.per=epoch", "schedule.warmup_epochs=1"], [1, 1, 0.5]),
        (["schedule.kind=constant", "schedule.warmup_epochs=2"], [0.5, 1, 1]),
    ],
)
def test_schedules_reach_the_log_and_the_optimizer(
    changes: list[str], factors: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    step = torch.optim.SGD.step

    def spy(self: torch.optim.SGD, *args: Any) -> Any:
        used.append(self.param_groups[0]["lr"])
        return step(self, *args)

    monkeypatch.setattr(torch.optim.SGD, "step", spy)
    run(tmp_path / "run", "epochs=3", *changes)
    logged = [float(line["lr"]) for line in lines(tmp_path / "run")]
    assert logged == pytest.approx([0.3 * factor for factor in factors])
    assert logged == used[2::3]


def test_rule_options_reach_the_rule(tmp_path: Path) -> None:
    masks = []
    for seed in (1, 2):
        settings = tiny("rule.name=random", f"rule.options.seed={seed}")
        torch.manual_seed(0)
        wiring = build(settings, 10, CPU)[1]
        assert wiring is not None
        (mask,) = wiring.masks().values()
        masks.append(mask)
    assert not torch.equal(*masks)
    with pytest.raises((WiringError, TypeError), match="does not take these settings"):
        run(tmp_path / "run", "rule.options.nonsense=1")
    assert not (tmp_path / "run").exists()


def test_refuses_to_overwrite_a_run(plain: Path) -> None:
    before = (plain / "last.safetensors").read_bytes()
    with pytest.raises(WiringError, match=r"already holds a run\. Continue it with --resume"):
        run(plain)
    assert (plain / "last.safetensors").read_bytes() == before


def test_refuses_to_overwrite_a_result_without_its_checkpoint(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "run")
    (tmp_path / "run" / "last.safetensors").unlink()
    for resume in (True, False):
        with pytest.raises(WiringError, match=r"has the result of a run, but no last.safetensors"):
            run(tmp_path / "run", resume=resume)


def test_detects_a_flipped_bit_in_a_checkpoint(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "run")
    path = tmp_path / "run" / "last.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-5] ^= 1  # in the data, which follows the header
    path.write_bytes(whole)
    with pytest.raises(WiringError, match=r"damaged .*its checksum does not match its contents"):
        run(tmp_path / "run", resume=True)


@pytest.mark.parametrize("device", ["gpu", "meta", "cud"], ids=["other word", "other type", "typo"])
def test_rejects_unknown_devices(device: str, tmp_path: Path) -> None:
    with pytest.raises(WiringError, match=f"device must be cuda or cpu, got '{device}'"):
        loop.train(RECIPE, recipes.get(RECIPE).settings, tmp_path / "run", device=device)


def test_resuming_a_finished_run_changes_nothing(plain: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in plain.iterdir()}
    result = run(plain, resume=True)
    assert result == results.read(plain / "result.json")
    assert {path.name: path.stat().st_mtime_ns for path in plain.iterdir()} == before


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """A run that was interrupted in its second epoch."""
    with pytest.raises(BreakError):
        run(tmp_path / "half", log=Stops(4))
    return tmp_path / "half"


def test_a_checkpoint_is_plain_safetensors(half: Path) -> None:
    with safetensors.safe_open(half / "last.safetensors", framework="np") as file:
        about = json.loads(file.metadata()["about"])
        names = set(file.keys())
    assert about["recipe"] == RECIPE
    assert about["progress"]["epoch"] == 1
    assert {name.partition(".")[0] for name in names} == {"model", "optimizer", "random", "seen"}
    raw = (half / "last.safetensors").read_bytes()
    assert raw[8:9] == b"{"  # the header's length, the header, the data: nothing is pickled


@pytest.mark.parametrize("name", ["last.safetensors", "log.csv"])
def test_a_full_disk_keeps_the_last_checkpoint(name: str, half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (half / "last.safetensors").read_bytes()
    replace = files.os.replace

    def full(part: str, path: Path) -> None:
        if Path(path).name == name:
            Path(part).write_bytes(b"half of")
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(part, path)

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(WiringError, match=rf"{name} could not be written: the disk is full.*--resume"):
        run(half, resume=True)
    assert (half / "last.safetensors").read_bytes() == before
    assert not list(half.glob(".*"))
    monkeypatch.undo()
    assert run(half, resume=True).steps == 6


def test_a_failed_write_keeps_the_last_checkpoint(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (half / "last.safetensors").read_bytes()

    def fails(tensors: Any, path: str, header: Any) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", fails)
    with pytest.raises(WiringError, match="the disk is full"):
        run(half, resume=True)
    assert (half / "last.safetensors").read_bytes() == before
    assert not list(half.glob(".*"))


def test_removes_partial_files_of_a_killed_process(half: Path) -> None:
    (half / ".last.safetensors.12345.part").write_bytes(b"half of it")
    run(half, resume=True)
    assert not list(half.glob(".*"))


def test_rejects_a_file_as_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WiringError, match=r"file cannot be written: .*Give another --out"):
        run(tmp_path / "file")
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("damage", ["cut", "zeros", "empty", "plain"])
def test_rejects_a_damaged_checkpoint(damage: str, half: Path) -> None:
    path = half / "last.safetensors"
    whole = path.read_bytes()
    if damage == "plain":
        safetensors.torch.save_file({"a": torch.zeros(1)}, path)
    else:
        path.write_bytes({"cut": whole[: len(whole) // 2], "zeros": bytes(len(whole)), "empty": b""}[damage])
    with pytest.raises(WiringError, match=r"last\.safetensors is damaged or not a checkpoint of wirings"):
        run(half, resume=True)
    with pytest.raises(WiringError, match="damaged or not a checkpoint"):
        runs.measure(half, device="cpu")
    path.write_bytes(whole)
    assert run(half, resume=True).steps == 6


def test_rejects_a_checkpoint_of_another_run(half: Path) -> None:
    with pytest.raises(WiringError, match="belongs to the recipe 'digits/static-dnw', not to 'other'"):
        loop.train("other", tiny(), half, device="cpu", resume=True)
    with pytest.raises(WiringError, match=r"was trained with optimizer\.lr = 0\.3, but now it is 0\.2"):
        run(half, "optimizer.lr=0.2", resume=True)
    with pytest.raises(WiringError, match=r"was trained with seed = 0, but now it is 1"):
        run(half, "seed=1", resume=True)
    tensors, about = checkpoint.read(half / "last.safetensors")
    with pytest.raises(WiringError, match="does not fit this model"):
        checkpoint.load_model(torch.nn.Linear(2, 2), tensors, half)
    del tensors, about
    assert run(half, "checkpoint_every=1", "data.workers=0", resume=True).steps == 6  # neutral settings


def test_rejects_a_missing_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(WiringError, match="there is no checkpoint"):
        checkpoint.read(tmp_path / "last.safetensors")
    with pytest.raises(WiringError, match="is not the folder of a run"):
        runs.measure(tmp_path)
    assert run(tmp_path / "new", resume=True).steps == 6  # without a checkpoint, it starts from the beginning


def test_stops_if_the_loss_is_not_finite(tmp_path: Path) -> None:
    boom = ["schedule.kind=multistep", "schedule.milestones=[1]", "schedule.factor=1e30", "clip=null", "epochs=3"]
    with pytest.raises(WiringError) as caught:
        run(tmp_path / "run", *boom)
    text = str(caught.value)
    assert re.match(r"training diverged at step 5 \(lr 3e\+29\): the loss and weights of stem\.weight", text)
    assert f"The last good checkpoint is {tmp_path / 'run' / 'last.safetensors'}" in text
    tensors, about = checkpoint.read(tmp_path / "run" / "last.safetensors")
    assert about["progress"]["steps"] == 3
    assert all(value.isfinite().all() for value in tensors.values() if value.is_floating_point())
    assert len(lines(tmp_path / "run")) == 1


def test_does_not_save_weights_that_are_not_finite(tmp_path: Path) -> None:
    boom = [
        "optimizer.lr=1e38",
        "optimizer.weight_decay=1e10",
        "clip=null",
        "batch=50",
        "epochs=1",
    ]  # the only loss is finite
    with pytest.raises(WiringError, match=r"step 1 .*weights of .* are not finite\. There is no checkpoint yet"):
        run(tmp_path / "run", *boom)
    assert [path.name for path in (tmp_path / "run").glob("*.safetensors")] == ["initial.safetensors"]


def test_names_the_step_and_lr_that_diverged(tmp_path: Path) -> None:
    changes = ["schedule.per=step", "clip=null", "optimizer.lr=1e30", "epochs=1", "batch=10"]
    with pytest.raises(WiringError, match=r"at step 2 \(lr 9\.04508e\+29\)"):
        run(tmp_path / "run", *changes)


def test_reset_undoes_the_steps_of_a_warm_up() -> None:
    settings = tiny("ema=0.9")
    model, wiring = build(settings, 10, CPU)
    step = TrainingStep(model, wiring, make_optimizer(model, wiring, settings, CPU.device), settings, CPU.device)
    state, scaler = {name: value.clone() for name, value in model.state_dict().items()}, step.scaler.state_dict()
    x, y = torch.randn(6, 1, 8, 8), torch.arange(6)
    step(x, y, 6)
    once = {name: value.clone() for name, value in model.state_dict().items()}
    assert not torch.equal(once["stem.weight"], state["stem.weight"])
    reset(step, state, scaler)
    assert step.average is not None
    for name, value in state.items():
        assert torch.equal(model.state_dict()[name], value)
        assert torch.equal(step.average.state_dict()[name], value)
    assert (step.count.item(), step.bad.item(), step.totals.tolist()) == (0, -1, [0, 0, 0])
    step(x, y, 6)
    for name, value in once.items():
        assert torch.equal(model.state_dict()[name], value)


def test_tensorboard_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path / "run", "history_every=1", log=ConsoleLog(tensorboard=True))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("accuracy")] == [
        (int(line["epoch"]), pytest.approx(float(line["accuracy"]))) for line in lines(tmp_path / "run")
    ]
    tags = events.Tags()["images"]
    state = {"wiring/adjacency", "wiring/blocks", "wiring/degrees", "wiring/density"}
    assert state < set(tags)  # and, from the second epoch on, pictures of the history
    assert {tag for tag in tags if len(events.Images(tag)) == 2} >= state
    assert "wiring/births-and-deaths-edges" in tags


def test_progress_bar_stops_if_the_run_fails(tmp_path: Path) -> None:
    class Broken(ConsoleLog):
        def batch(self, done: int) -> None:
            raise BreakError

    log = Broken()
    with pytest.raises(BreakError):
        run(tmp_path / "run", log=log)
    assert log.bar.finished or not log.bar.live.is_started
