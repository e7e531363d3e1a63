"""Settings: every key changes something, errors name the key, schedules match PyTorch's."""

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from wirings import WiringError
from wirings.train import typed_dataclasses as typed
from wirings.train.settings import (
    NEUTRAL,
    OPTIMIZER_OPTIONS,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    ScheduleSettings,
    Settings,
    documented,
    from_mapping,
    to_mapping,
    with_overrides,
)
from wirings.train.yaml_io import dump_yaml, parse_yaml

PLAIN = Settings(ModelSettings("tiny_static"))
KEYS = typed.leaves(Settings)

# A value other than the default for every setting; new settings must be added here.
OTHER: dict[str, Any] = {
    "model.name": "tiny_discrete",
    "model.options": {"edges": 100},
    "rule.name": "random",
    "rule.options": {"schedule": "cubic"},
    "data.name": "digits",
    "data.directory": "somewhere",
    "data.augment": False,
    "data.workers": 2,
    "data.image_size": 64,
    "data.skip_corrupt": True,
    "data.options": {"shards": [1, 2]},
    "optimizer.name": "adamw",
    "optimizer.lr": 0.2,
    "optimizer.momentum": 0.5,
    "optimizer.nesterov": True,
    "optimizer.betas": [0.9, 0.95],
    "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 5e-5,
    "optimizer.weight_decay_edges": 0.0,
    "optimizer.weight_decay_norms": False,
    "optimizer.ham_alpha": 200.0,
    "optimizer.ham_beta": 1e-3,
    "optimizer.no_decay": ["*.bn?"],
    "schedule.kind": "cosine",
    "schedule.milestones": [3, 5],
    "schedule.factor": 0.5,
    "schedule.floor": 0.1,
    "schedule.warmup_epochs": 2.5,
    "schedule.warmup_steps": 100,
    "schedule.per": "epoch",
    "start.recipe": "table2/complete",
    "start.weights": "initial",
    "start.prune": True,
    "epochs": 50,
    "steps": 1000,
    "batch": 128,
    "accumulate": 2,
    "label_smoothing": 0.1,
    "precision": "bf16",
    "norm_scales": "uniform",
    "channels_last": True,
    "fast": True,
    "ema": 0.999,
    "clip": 1.0,
    "seed": 7,
    "evaluate_every": 5,
    "checkpoint_epochs": 3,
    "checkpoint_every": 100,
    "history_every": 10,
}


def test_other_values_cover_all_settings() -> None:
    assert list(KEYS) == list(OTHER)
    assert set(KEYS) >= NEUTRAL


@pytest.mark.parametrize("key", OTHER)
def test_every_setting_can_be_overridden_and_round_trips(key: str) -> None:
    text = f"{key}={dump_yaml(OTHER[key]).removesuffix('...' + chr(10))}"
    adam = key.removeprefix("optimizer.") in OPTIMIZER_OPTIONS["adamw"]
    plain = dataclasses.replace(PLAIN, optimizer=OptimizerSettings("adamw")) if adam else PLAIN
    changed, different = with_overrides(plain, [text])
    assert changed != plain
    assert different == ({} if key in NEUTRAL else {key: OTHER[key]})
    flat = {name: typed.at(to_mapping(changed), name) for name in KEYS}
    assert flat == {name: typed.at(to_mapping(plain), name) for name in KEYS} | {key: OTHER[key]}
    assert from_mapping(to_mapping(changed)) == changed
    assert from_mapping(parse_yaml(dump_yaml(to_mapping(changed)), "it")) == changed
    assert from_mapping(yaml.safe_load(yaml.safe_dump(to_mapping(changed)))) == changed
    assert with_overrides(changed, [text]) == (changed, {})


@pytest.mark.parametrize("key", KEYS)
def test_every_setting_has_a_help_text(key: str) -> None:
    assert documented()[key].endswith(".")
    assert set(documented()) == set(KEYS)


def test_epochs_count_only_without_steps() -> None:
    in_steps, _ = with_overrides(PLAIN, ["steps=5"])
    with pytest.raises(WiringError, match="epochs = 3 has no effect, since the training has steps = 5"):
        with_overrides(in_steps, ["epochs=3"])
    changed, different = with_overrides(in_steps, ["epochs=3", "steps=null"])
    assert changed.length(10) == (3, 30)
    assert different == {"epochs": 3, "steps": None}


def test_mappings_are_copies() -> None:
    mapping = {"model": {"name": "tiny_static", "options": {"a": [1]}}}
    settings = from_mapping(mapping)
    mapping["model"]["options"]["a"].append(2)
    to_mapping(settings)["model"]["options"]["a"].append(3)
    assert settings.model.options == {"a": [1]}


def _values(annotation: Any) -> st.SearchStrategy[Any]:
    """Plain values of the annotated type, valid or invalid for the setting."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in (bool, int, float, str):
        simple = {
            bool: st.booleans(),
            int: st.integers(),
            float: st.floats(-1, 2),
            str: st.text("abc: =[{", max_size=4),
        }
        return simple[annotation]
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is tuple:
        return st.lists(_values(inner[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(st.text("abc", min_size=1), st.none() | st.booleans() | st.integers() | st.text("ab1e"))
    return st.one_of(*(st.none() if option is type(None) else _values(option) for option in inner))


@given(data=st.data())
def test_random_overrides_are_applied_exactly_or_rejected(data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.sampled_from(sorted(KEYS)), unique=True, max_size=4))
    wanted = {key: data.draw(_values(KEYS[key]) | st.just(OTHER[key]), label=key) for key in keys}
    # In flow style, a value is one line, as on a command line.
    texts = [f"{key}={yaml.safe_dump(value, default_flow_style=True, width=math.inf)}" for key, value in wanted.items()]
    before = copy.deepcopy(PLAIN)
    try:
        changed, different = with_overrides(PLAIN, texts)
    except WiringError:
        return
    finally:
        assert before == PLAIN
    after, then = to_mapping(changed), to_mapping(PLAIN)
    assert all(typed.at(after, key) == value for key, value in wanted.items())
    assert all(typed.at(after, key) == typed.at(then, key) for key in set(KEYS) - set(keys))
    assert set(different) == {key for key in keys if typed.at(after, key) != typed.at(then, key)} - NEUTRAL
    assert from_mapping(after) == changed


def test_overrides() -> None:
    changed, different = with_overrides(
        PLAIN, ["optimizer.lr=0.2", " epochs = 50", "model.options.steps=3", "batch=512", "model.options.a.b=1e-4"]
    )
    assert (changed.optimizer.lr, changed.epochs) == (0.2, 50)
    assert changed.model.options == {"steps": 3, "a": {"b": 1e-4}}
    assert different == {"optimizer.lr": 0.2, "epochs": 50, "model.options.steps": 3, "model.options.a.b": 1e-4}
    assert with_overrides(changed, ["epochs=160", "epochs=50"]) == (changed, {})
    assert with_overrides(PLAIN, []) == (PLAIN, {})
    # 1 == True in Python, but options may tell them apart.
    one, _ = with_overrides(PLAIN, ["model.options.adjoint=1"])
    assert with_overrides(one, ["model.options.adjoint=true"])[1] == {"model.options.adjoint": True}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer.lr", "'optimizer.lr' is not an override. Expected name=value, such as optimizer.lr=0.2."),
        ("=3", "'=3' is not an override"),
        (
            "lr=0.2",
            "unknown setting 'lr'. Did you mean 'optimizer.lr'? Choose from: model, rule, data, optimizer, schedule,",
        ),
        ("epoch=3", "unknown setting 'epoch'. Did you mean 'epochs'?"),
        (
            "optimizer.momentun=0",
            "unknown setting 'optimizer.momentun'. Did you mean 'optimizer.momentum'? Choose from: opt",
        ),
        (
            "optimizer.milestones=[3]",
            "Did you mean 'schedule.milestones'? Choose from: optimizer.name, optimizer.lr,",
        ),
        ("optimzer.lr=1", "unknown setting 'optimzer.lr'. Did you mean 'optimizer.lr'?"),
        ("epochs.lr=1", "unknown setting 'epochs.lr'. Did you mean 'optimizer.lr'?"),
        ("xyzzy=1", "unknown setting 'xyzzy'. Choose from: model, rule,"),
        ("optimizer={lr: 1}", "'optimizer' is a group. Set one of optimizer.name, optimizer.lr,"),
        ("model.options.a=[", "the value of model.options.a is not YAML"),
        ("model.options.a={b: 1, b: 2}", "found the key 'b' twice"),
        ("model.options.a=2020-13-45", "the value of model.options.a is not YAML: month must be"),
        ("model.options.a=2020-12-24", "model.options.a must be a string, a finite number"),
        ("model.options.a=.nan", "model.options.a must be a string, a finite number"),
        ("model.options.a={1: 2}", "model.options.a must have strings as keys, got 1."),
        ("model.options.rule=dnw", "model.options cannot have 'rule'. Set rule.name and model.name instead."),
        ("model.options=3", "model.options must be a mapping, got 3 (int)."),
        ("model.name=tiny_statik", "unknown model 'tiny_statik'. Did you mean 'tiny_static'? Choose from: "),
        ("rule.name=dwn", "unknown rule 'dwn'. Did you mean 'dnw'? Choose from: "),
        ("data.name=", "data.name must be a string, got null."),
        ("data.name=''", "data.name must be the name of a data set"),
        ("data.workers=-1", "data.workers must be 0 or more, got -1."),
        ("data.image_size=0", "data.image_size must be 1 or more, got 0."),
        ("data.augment=1", "data.augment must be true or false, got 1 (int)."),
        ("data.directory=3", "data.directory must be a string or null, got 3 (int)."),
        ("epochs=0", "epochs must be 1 or more, got 0."),
        ("epochs=1.5", "epochs must be an integer, got 1.5 (float)."),
        ("epochs=true", "epochs must be an integer, got True (bool)."),
        ("epochs=", "epochs must be an integer, got null."),
        ("batch=0", "batch must be 1 or more"),
        ("accumulate=0", "accumulate must be 1 or more"),
        ("accumulate=600", "accumulate must be at most the batch, 512, got 600."),
        ("evaluate_every=0", "evaluate_every must be 1 or more"),
        ("checkpoint_every=0", "checkpoint_every must be 1 or more"),
        ("checkpoint_every=x", "checkpoint_every must be an integer or null, got 'x' (str)."),
        ("label_smoothing=1", "label_smoothing must be at least 0 and below 1, got 1.0."),
        ("precision=fp64", "unknown precision 'fp64'. Did you mean 'fp16'? Choose from: bf16, fp16, fp32."),
        ("precision=16", "precision must be one of 'fp32', 'bf16', 'fp16', got 16 (int)."),
        ("ema=1", "ema must be above 0 and below 1, got 1.0."),
        ("clip=0", "clip must be above 0, got 0.0."),
        ("seed=-1", "seed must be at least 0 and below 2**63"),
        ("optimizer.lr=0", "optimizer.lr must be above 0, got 0.0."),
        ("optimizer.lr=fast", "optimizer.lr must be a finite number, got 'fast' (str)."),
        ("optimizer.lr=.inf", "optimizer.lr must be a finite number, got inf (float)."),
        ("optimizer.lr=true", "optimizer.lr must be a finite number, got True (bool)."),
        ("optimizer.momentum=1", "optimizer.momentum must be at least 0 and below 1, got 1.0."),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay must be 0 or more"),
        ("optimizer.weight_decay_edges=-1", "optimizer.weight_decay_edges must be 0 or more"),
        ("optimizer.ham_alpha=-1", "optimizer.ham_alpha must be 0 or more"),
        ("optimizer.ham_beta=-1", "optimizer.ham_beta must be 0 or more"),
        (
            "schedule.kind=cos",
            "unknown schedule.kind 'cos'. Did you mean 'cosine'? Choose from: constant, cosine, multistep.",
        ),
        ("schedule.per=steps", "unknown schedule.per 'steps'. Did you mean 'step'?"),
        (
            "schedule.kind=multistep",
            "schedule.kind is 'multistep', which needs schedule.milestones, such as [80, 120].",
        ),
        ("schedule.milestones=[5, 3]", "schedule.milestones must be increasing epochs from 1 on"),
        ("schedule.milestones=[0, 3]", "schedule.milestones must be increasing epochs from 1 on"),
        ("schedule.milestones=[3, 5.5]", "schedule.milestones[1] must be an integer, got 5.5 (float)."),
        ("schedule.milestones=3", "schedule.milestones must be a list of integers, got 3 (int)."),
        ("schedule.factor=0", "schedule.factor must be above 0"),
        ("schedule.warmup_epochs=-1", "schedule.warmup_epochs must be 0 or more"),
        (
            "schedule.warmup_epochs=161",
            "schedule.warmup_epochs must be at most epochs (160), got 161.",
        ),
    ],
)
def test_errors_name_the_key_and_the_value(text: str, message: str) -> None:
    with pytest.raises(WiringError) as caught:
        with_overrides(PLAIN, [text])
    assert message in str(caught.value)


def test_rejects_invalid_combinations() -> None:
    with pytest.raises(
        WiringError, match=r"optimizer.nesterov needs a momentum above 0, but optimizer.momentum is 0\."
    ):
        with_overrides(PLAIN, ["optimizer.nesterov=true", "optimizer.momentum=0"])
    with pytest.raises(WiringError, match=r"warmup_epochs must be an integer if schedule.per is 'epoch', got 2.5"):
        with_overrides(PLAIN, ["schedule.per=epoch", "schedule.warmup_epochs=2.5"])
    with pytest.raises(WiringError, match=r"'model.options.a.b' cannot be set: 'a' must be a mapping, got 1"):
        with_overrides(PLAIN, ["model.options.a=1", "model.options.a.b=1"])


def test_from_mapping_checks_types() -> None:
    model = {"name": "tiny_static"}
    assert from_mapping(
        {"model": model, "optimizer": {"lr": 1, "weight_decay": "1e-4"}}
    ).optimizer == OptimizerSettings(lr=1)
    assert type(OptimizerSettings(lr=1).lr) is float
    for mapping, message in [
        ({}, "the setting 'model.name' is missing. It must be a string."),
        ({"model": {}}, "the setting 'model.name' is missing"),
        ({"model": None}, "model must be a mapping (name, options), got null."),
        ([], "the file must be a mapping (model, rule, data,"),
        ({"model": model, 3: 4}, "unknown setting '3'."),
        ({"model": {**model, "width": 1}}, "unknown setting 'model.width'. Choose from: model.name, model.options."),
        ({"model": model, "optimizer": {"lr": [1]}}, "optimizer.lr must be a finite number, got [1] (list)."),
    ]:
        with pytest.raises(WiringError) as caught:
            from_mapping(mapping)
        assert message in str(caught.value)
    # Constructors check as well.
    with pytest.raises(WiringError, match=r"epochs must be an integer"):
        dataclasses.replace(PLAIN, epochs="many")  # type: ignore[arg-type]
    with pytest.raises(WiringError, match=r"model must be a ModelSettings"):
        Settings("tiny_static")  # type: ignore[arg-type]
    with pytest.raises(WiringError, match=r"data.options.a must be a string, a finite number"):
        DataSettings(options={"a": Path()})


def _rates(make: Any, count: int, every: int = 1) -> list[float]:
    """The learning rates of a PyTorch scheduler that starts from 1, over ``count`` steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, found = make(optimizer), []
    for step in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if (step + 1) % every == 0:
            scheduler.step()
    return found


def _ours(schedule: ScheduleSettings, steps: int, epochs: int) -> list[float]:
    return [schedule.factor_at(step, steps, epochs) for step in range(steps * epochs)]


@pytest.mark.parametrize("steps", [1, 7])
def test_schedules_match_pytorch(steps: int) -> None:
    epochs, schedulers = 10, torch.optim.lr_scheduler
    multistep = ScheduleSettings("multistep", milestones=(4, 7), factor=0.2)
    theirs = _rates(lambda o: schedulers.MultiStepLR(o, [4, 7], gamma=0.2), steps * epochs, every=steps)
    assert _ours(multistep, steps, epochs) == pytest.approx(theirs)
    theirs = _rates(lambda o: schedulers.CosineAnnealingLR(o, steps * epochs), steps * epochs)
    assert _ours(ScheduleSettings("cosine"), steps, epochs) == pytest.approx(theirs)
    theirs = _rates(lambda o: schedulers.CosineAnnealingLR(o, epochs), steps * epochs, every=steps)
    assert _ours(ScheduleSettings("cosine", per="epoch"), steps, epochs) == pytest.approx(theirs)
    assert _ours(ScheduleSettings(), steps, epochs) == [1.0] * (steps * epochs)


def test_warm_up() -> None:
    schedule = ScheduleSettings("constant", warmup_epochs=1.5)
    assert _ours(schedule, 4, 2) == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 1, 1])
    # A cosine then goes to 0 over the steps that are left; milestones are counted from the start.
    schedulers = torch.optim.lr_scheduler
    cosine = _ours(ScheduleSettings("cosine", warmup_epochs=2), 5, 6)
    assert cosine[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert cosine[10:] == pytest.approx(_rates(lambda o: schedulers.CosineAnnealingLR(o, 20), 20))
    multistep = _ours(ScheduleSettings("multistep", milestones=(2,), warmup_epochs=1), 2, 3)
    assert multistep == pytest.approx([0.5, 1, 1, 1, 0.1, 0.1])
    # Once an epoch: 1/2 and 1, then a cosine over the other 4 epochs.
    by_epoch = _ours(ScheduleSettings("cosine", warmup_epochs=2, per="epoch"), 5, 6)
    assert by_epoch[:10] == [0.5] * 5 + [1.0] * 5
    assert by_epoch[10:] == pytest.approx(_rates(lambda o: schedulers.CosineAnnealingLR(o, 4), 20, every=5))
    # The end, and a run that is all warm-up.
    assert ScheduleSettings("cosine").factor_at(10, 1, 10) == pytest.approx(0)
    assert ScheduleSettings("cosine").factor_at(99, 1, 10) == pytest.approx(0)
    assert _ours(ScheduleSettings("cosine", warmup_epochs=2), 1, 2) == [0.5, 1.0]


def test_lengths_and_schedules_in_steps() -> None:
    settings = from_mapping({"model": {"name": "gpt"}, "steps": 25, "schedule": {"kind": "cosine"}})
    assert settings.length(10) == (3, 25)
    assert PLAIN.length(10) == (160, 1600)
    by_step = ScheduleSettings("cosine", warmup_steps=5, floor=0.1)
    factors = [by_step.factor_at(step, 10, 3, 25) for step in range(25)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    theirs = _rates(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20, eta_min=0.1), 20)
    assert factors[5:] == pytest.approx(theirs)
    assert by_step.factor_at(25, 10, 3, 25) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["optimizer.betas=[0.9]"], "optimizer.betas must be two numbers of at least 0 and below 1, got [0.9]."),
        (["optimizer.betas=[0.9, 1]"], "optimizer.betas must be two numbers"),
        (["optimizer.eps=0"], "optimizer.eps must be above 0, got 0.0."),
        (["optimizer.name=adam"], "unknown optimizer.name 'adam'. Did you mean 'adamw'?"),
        (["optimizer.name=adamw", "optimizer.nesterov=true"], "optimizer.nesterov = True is an option of sgd"),
        (
            ["optimizer.name=adamw", "optimizer.momentum=0.5"],
            "optimizer.momentum = 0.5 is an option of sgd, but optimizer.name is 'adamw'. Leave it out, or at its "
            "default, 0.9.",
        ),
        (["optimizer.betas=[0.9, 0.95]"], "optimizer.betas = [0.9, 0.95] is an option of adamw, but"),
        (["optimizer.eps=1e-6"], "optimizer.eps = 1e-06 is an option of adamw, but optimizer.name is 'sgd'."),
        (["steps=5", "epochs=3"], "epochs = 3 has no effect, since the training has steps = 5. Use --set steps=…"),
        (["schedule.floor=2"], "schedule.floor must be from 0 to 1, got 2.0."),
        (["schedule.warmup_steps=3", "schedule.warmup_epochs=1"], "schedule.warmup_steps excludes"),
        (["schedule.warmup_steps=3", "schedule.per=epoch"], "schedule.warmup_steps excludes schedule.per = epoch"),
        (["steps=3", "schedule.warmup_steps=4"], "steps must be at least schedule.warmup_steps (4), got 3."),
    ],
)
def test_rejects_invalid_optimizers_and_lengths(changes: list[str], message: str) -> None:
    with pytest.raises(WiringError) as caught:
        with_overrides(PLAIN, changes)
    assert message in str(caught.value)


def test_settings_with_the_former_rule_nm_are_read_as_a_structure() -> None:
    model = {"name": "resnet18", "options": {"width": 0.5}}
    now = from_mapping({"model": model, "rule": {"name": "nm", "options": {"n": 3, "m": 32}}})
    assert (now.rule.name, now.rule.options) == ("dnw", {})
    assert now.model.options == {"width": 0.5, "structure": "3:32"}
    assert from_mapping({"model": model, "rule": {"name": "nm"}}).model.options["structure"] == "2:4"
    for rule in ({"name": "nm", "options": {"n": 3, "k": 1}}, {"name": "nm", "options": 3}):
        with pytest.raises(WiringError):
            from_mapping({"model": model, "rule": rule})


def test_a_structure_is_text_without_quotes() -> None:
    """YAML 1.1 reads 2:4 as a number in base 60."""
    changed, _ = with_overrides(PLAIN, ["model.options.structure=2:4"])
    assert changed.model.options == {"structure": "2:4"}
