"""The settings of a training run: typed and checked. The docstrings below the fields are their help texts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from wirings import models, rules
from wirings.errors import WiringError, unknown
from wirings.train import typed_dataclasses as typed
from wirings.train.typed_dataclasses import TypedDataclass
from wirings.train.yaml_io import parse_yaml
from wirings.utils.importing import check_import_path, is_import_path
from wirings.utils.text import brief

NEUTRAL = frozenset(
    {"seed", "data.directory", "data.workers", "checkpoint_every", "checkpoint_epochs", "history_every"}
)
"""Settings that do not change a recipe: a run with other values of these still counts as the recipe's."""
OPTIMIZER_OPTIONS = {"sgd": ("momentum", "nesterov"), "adamw": ("betas", "eps")}
"""Settings of one optimizer alone."""
_NOT_DATA_OPTIONS = ("batch", "device", "seed", "rank", "world")
"""Options of a data set that the run sets itself, besides the fields of `DataSettings`."""


@dataclass(frozen=True)
class ModelSettings(TypedDataclass):
    """The model and its options."""

    prefix: ClassVar[str] = "model."
    name: str
    """A model's name: one of `wirings.models.names()`, or ``package.module:function`` for a function of your own."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the model, such as edges or steps."""

    def check(self) -> None:
        if is_import_path(self.name):
            check_import_path(self.name, "model.name")
        elif self.name not in models.names():
            raise unknown("model", self.name, models.names())
        if taken := {"rule", "name"} & self.options.keys():
            raise WiringError(f"model.options cannot have {min(taken)!r}. Set rule.name and model.name instead.")


@dataclass(frozen=True)
class RuleSettings(TypedDataclass):
    """The rule that chooses the wiring, and its options."""

    prefix: ClassVar[str] = "rule."
    name: str = "dnw"
    """The name of the rule, one of `wirings.rules.names()`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the rule."""

    def check(self) -> None:
        if "rule" in self.options:
            raise WiringError("rule.options cannot hold 'rule'. Set rule.name instead.")
        rules.get(self.name, **self.options)  # raises for an unknown name or option


@dataclass(frozen=True)
class DataSettings(TypedDataclass):
    """The data set, and how its images are read."""

    prefix: ClassVar[str] = "data."
    name: str = "cifar10"
    """A data set's name, or ``package.module:function`` for a function of your own."""
    directory: str | None = None
    """The folder that holds the data; null for the data set's default."""
    augment: bool = True
    """Whether training images are cropped and flipped at random."""
    workers: int = 4
    """The number of processes that read images, for data that does not fit in memory."""
    image_size: int | None = None
    """Height and width of an image in pixels; null for the data set's own."""
    skip_corrupt: bool = False
    """Whether to skip images that cannot be decoded; otherwise they raise an error."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of the data set."""

    def check(self) -> None:
        self.need("name", bool(self.name), "the name of a data set")
        if is_import_path(self.name):
            check_import_path(self.name, "data.name")
        if taken := self.options.keys() & {*typed.typed_fields(DataSettings), *_NOT_DATA_OPTIONS}:
            raise WiringError(f"data.options cannot hold {min(taken)!r}, which is a setting outside of it.")
        self.need("workers", self.workers >= 0, "0 or more")
        self.need("image_size", (self.image_size or 0) >= 1, "1 or more")


@dataclass(frozen=True)
class OptimizerSettings(TypedDataclass):
    """Stochastic gradient descent, or AdamW."""

    prefix: ClassVar[str] = "optimizer."
    name: Literal["sgd", "adamw"] = "sgd"
    """The optimizer: sgd or adamw."""
    lr: float = 0.1
    """The base learning rate, which the schedule multiplies."""
    momentum: float = 0.9
    """The momentum factor of SGD."""
    nesterov: bool = False
    """Whether to use Nesterov momentum, with SGD."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """The decay rates of AdamW's averages of the gradient and of its square."""
    eps: float = 1e-8
    """The number that AdamW adds to denominators."""
    weight_decay: float = 1e-4
    """The weight decay: the L2 penalty of SGD, or the decoupled one of AdamW, which the learning rate multiplies."""
    weight_decay_edges: float | None = None
    """The weight decay of edges, including hallucinated ones; null for the same as other weights."""
    weight_decay_norms: bool = True
    """Whether weight decay applies to norms and biases."""
    ham_alpha: float = 0.0
    """The strength of the gradient in HAM's step after the optimizer's (`wirings.HAM`); its authors use 200. There is
    no such step if this and ham_beta are 0."""
    ham_beta: float = 0.0
    """The strength of the shrinking in HAM's step; its authors use 1e-3."""
    no_decay: tuple[str, ...] = ()
    """Patterns of parameters and modules without weight decay, such as ``*.bn?``; see ``skip`` of `wirings.wire_`."""

    def check(self) -> None:
        self.need("lr", self.lr > 0, "above 0")
        self.need("momentum", 0 <= self.momentum < 1, "at least 0 and below 1")
        self.need("weight_decay", self.weight_decay >= 0, "0 or more")
        self.need("weight_decay_edges", (self.weight_decay_edges or 0) >= 0, "0 or more")
        right = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        self.need("betas", right, "two numbers of at least 0 and below 1")
        self.need("eps", self.eps > 0, "above 0")
        self.need("ham_alpha", 0 <= self.ham_alpha < math.inf, "0 or more")
        self.need("ham_beta", 0 <= self.ham_beta < math.inf, "0 or more")
        for other in OPTIMIZER_OPTIONS.keys() - {self.name}:
            for option in OPTIMIZER_OPTIONS[other]:
                # Files of finished runs list all options, so the defaults of those that are not used are accepted.
                value, default = (typed.to_plain(getattr(of, option)) for of in (self, OptimizerSettings))
                if value != default:
                    raise WiringError(
                        f"optimizer.{option} = {value} is an option of {other}, but optimizer.name is {self.name!r}. "
                        f"Leave it out, or at its default, {default}."
                    )
        if self.nesterov and self.momentum == 0:
            raise WiringError("optimizer.nesterov needs a momentum above 0, but optimizer.momentum is 0.")


@dataclass(frozen=True)
class ScheduleSettings(TypedDataclass):
    """How the learning rate changes during training."""

    prefix: ClassVar[str] = "schedule."
    kind: Literal["constant", "multistep", "cosine"] = "constant"
    """Constant; multistep, which multiplies by the factor at each milestone; or cosine, which decays to the floor."""
    milestones: tuple[int, ...] = ()
    """The epochs, counted from 0, at whose start a multistep schedule multiplies."""
    factor: float = 0.1
    """The factor of a multistep schedule."""
    floor: float = 0.0
    """The fraction of the base learning rate at which a cosine schedule ends."""
    warmup_epochs: float = 0.0
    """The number of epochs in which the learning rate rises linearly from 0 at the start."""
    warmup_steps: int | None = None
    """The same as a number of optimizer steps, instead of warmup_epochs."""
    per: Literal["step", "epoch"] = "step"
    """Whether cosine and warm-up change the learning rate every step or every epoch."""

    def check(self) -> None:
        increasing = all(a < b for a, b in zip((0, *self.milestones), self.milestones, strict=False))
        self.need("milestones", increasing, "increasing epochs from 1 on")
        self.need("factor", self.factor > 0, "above 0")
        self.need("floor", 0 <= self.floor <= 1, "from 0 to 1")
        self.need("warmup_epochs", self.warmup_epochs >= 0, "0 or more")
        self.need("warmup_steps", (self.warmup_steps or 0) >= 0, "0 or more")
        if self.warmup_steps is not None and (self.warmup_epochs or self.per == "epoch"):
            other = "warmup_epochs" if self.warmup_epochs else "per"
            raise WiringError(f"schedule.warmup_steps excludes schedule.{other} = {getattr(self, other)}. Give one.")
        if self.kind == "multistep" and not self.milestones:
            raise WiringError("schedule.kind is 'multistep', which needs schedule.milestones, such as [80, 120].")
        if self.per == "epoch":
            self.need("warmup_epochs", self.warmup_epochs.is_integer(), "an integer if schedule.per is 'epoch'")

    def factor_at(self, step: int, steps_per_epoch: int, epochs: int, steps: int | None = None) -> float:
        """The factor of the base learning rate at optimizer step ``step``, counted from 0.

        Args:
            step: the step.
            steps_per_epoch: the number of steps of an epoch.
            epochs: the number of epochs of the training.
            steps: the number of steps of the training, if the last epoch is shorter than the others.
        """
        unit = steps_per_epoch if self.per == "epoch" else 1
        at, end = step // unit, (epochs * steps_per_epoch if steps is None else steps) // unit
        warm = round(self.warmup_epochs * steps_per_epoch / unit) if self.warmup_steps is None else self.warmup_steps
        if at < warm:
            return (at + 1) / warm
        if self.kind == "multistep":
            return self.factor ** sum(step >= epoch * steps_per_epoch for epoch in self.milestones)
        if self.kind == "cosine":
            cosine = (1 + math.cos(math.pi * min((at - warm) / max(end - warm, 1), 1.0))) / 2
            return self.floor + (1 - self.floor) * cosine
        return 1.0


@dataclass(frozen=True)
class StartSettings(TypedDataclass):
    """What training starts from: a new network, or one trained by another recipe."""

    prefix: ClassVar[str] = "start."
    recipe: str | None = None
    """The recipe to train first, with the same seed; its weights choose the wiring. Null for a new network."""
    weights: Literal["initial", "trained"] = "trained"
    """Which weights of that network training starts from: those before its first step, or the trained ones."""
    prune: bool = False
    """Whether the trained network is pruned to the budget first: the weakest edges become zero, in one shot, and the
    rule starts from the wiring that is left."""

    def check(self) -> None:
        self.need("recipe", bool(self.recipe), "a recipe's name or a YAML file")


@dataclass(frozen=True)
class Settings(TypedDataclass):
    """All settings of a training run."""

    model: ModelSettings
    rule: RuleSettings = field(default_factory=RuleSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    start: StartSettings = field(default_factory=StartSettings)
    epochs: int = 160
    """The number of passes over the training data, unless steps is given."""
    steps: int | None = None
    """The number of optimizer steps, instead of epochs; the last epoch ends early if they are no multiple of it."""
    batch: int = 512
    """The number of images, windows of text or pairs of sentences per optimizer step, over all processes."""
    accumulate: int = 1
    """The number of parts that a batch is split into to save memory; their gradients are accumulated."""
    label_smoothing: float = 0.0
    """The amount of label smoothing, between 0 and 1."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The precision of the forward and backward pass; weights are always float32."""
    norm_scales: Literal["ones", "uniform"] = "ones"
    """The initial scales of batch and instance norms: 1, or uniform between 0 and 1, as in PyTorch before 1.2 and so in
    the paper's experiments."""
    channels_last: bool = False
    """Whether to use the channels-last memory format, which can make convolutions on a GPU faster."""
    fast: bool = False
    """Whether to compile the whole step and capture it in a CUDA graph, if possible."""
    ema: float | None = None
    """The decay of an exponential moving average of the weights, which is then evaluated. Null for no average."""
    clip: float | None = None
    """The norm over the edges in use that gradients are clipped to; null for no clipping."""
    seed: int = 0
    """The random seed."""
    evaluate_every: int = 1
    """The number of epochs between evaluations on the test images; the last epoch is always evaluated."""
    checkpoint_epochs: int = 1
    """The number of epochs between checkpoints; the last epoch always has one."""
    checkpoint_every: int | None = None
    """The number of steps between checkpoints within an epoch; null for checkpoints at the end of epochs only."""
    history_every: int | None = None
    """The number of steps between records of the wiring in history.wirings; 0 for no history; null for 200 records, or
    fewer if the wiring is large."""

    def check(self) -> None:
        for name in (
            "epochs",
            "steps",
            "batch",
            "accumulate",
            "evaluate_every",
            "checkpoint_epochs",
            "checkpoint_every",
        ):
            value = getattr(self, name)
            self.need(name, value is None or value >= 1, "1 or more")
        self.need("history_every", (self.history_every or 0) >= 0, "0 or more")
        self.need("accumulate", self.accumulate <= self.batch, f"at most the batch, {self.batch}")
        self.need("label_smoothing", 0 <= self.label_smoothing < 1, "at least 0 and below 1")
        self.need("ema", 0 < (self.ema or 0) < 1, "above 0 and below 1")
        self.need("clip", (self.clip or 0) > 0, "above 0")
        self.need("seed", 0 <= self.seed < 2**63, "at least 0 and below 2**63")
        if self.steps is not None:
            warm = self.schedule.warmup_steps
            self.need("steps", warm is None or warm <= self.steps, f"at least schedule.warmup_steps ({warm})")
        elif self.schedule.warmup_epochs > self.epochs:
            raise WiringError(
                f"schedule.warmup_epochs must be at most epochs ({self.epochs}), got {self.schedule.warmup_epochs:g}."
            )

    def length(self, per_epoch: int) -> tuple[int, int]:
        """The number of epochs and of optimizer steps of the training, if an epoch has ``per_epoch`` steps."""
        steps = self.epochs * per_epoch if self.steps is None else self.steps
        return -(-steps // per_epoch), steps


def from_mapping(mapping: Any) -> Settings:
    """Make settings from a mapping, such as a YAML file holds; those left out get their defaults."""
    return typed.build(Settings, _without_nm(mapping))


def _without_nm(mapping: Any) -> Any:
    """Settings of a run that was made when N:M was a rule, not a structure."""
    rule = mapping.get("rule") if isinstance(mapping, Mapping) else None
    if not isinstance(rule, Mapping) or rule.get("name") != "nm":
        return mapping
    given, model = rule.get("options") or {}, mapping.get("model")
    if not isinstance(given, Mapping) or not isinstance(model, Mapping) or not set(given) <= {"n", "m"}:
        return mapping
    structure = f"{given.get('n', 2)}:{given.get('m', 4)}"
    options = {**(model.get("options") or {}), "structure": structure}
    return {**mapping, "rule": {"name": "dnw"}, "model": {**model, "options": options}}


def to_mapping(settings: Settings) -> dict[str, Any]:
    """All settings as plain values, for YAML and JSON; `from_mapping` restores them."""
    mapping: dict[str, Any] = typed.to_plain(settings)
    return mapping


def documented() -> dict[str, str]:
    """The help texts of all settings, by their dotted names."""
    return typed.documented(Settings)


def with_overrides(settings: Settings, overrides: Iterable[str]) -> tuple[Settings, dict[str, Any]]:
    """Change settings.

    Args:
        settings: the settings to change.
        overrides: such as ``"optimizer.lr=0.2"``; the values are YAML.

    Returns:
        The new settings, and the values that differ from before, by their dotted names, without `NEUTRAL` ones.
    """
    before, after, keys = to_mapping(settings), to_mapping(settings), []
    for text in overrides:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key:
            raise WiringError(f"{brief(text)} is not an override. Expected name=value, such as optimizer.lr=0.2.")
        typed.put(after, key, parse_yaml(value, f"the value of {key}"), Settings)
        keys.append(key)
    changed = from_mapping(after)
    if "epochs" in keys and changed.steps is not None:
        raise WiringError(
            f"epochs = {changed.epochs} has no effect, since the training has steps = {changed.steps}. Use --set "
            "steps=…, or --set steps=null as well to count in epochs."
        )
    after = to_mapping(changed)
    different = [key for key in keys if key not in NEUTRAL and _text(before, key) != _text(after, key)]
    return changed, {key: typed.at(after, key) for key in different}


def first_difference(then: Settings, now: Settings) -> tuple[str, Any, Any] | None:
    """The first setting in which two runs differ, with both values; None if they are the same run."""
    before, after = to_mapping(then), to_mapping(now)
    for key in typed.leaves(Settings):
        if key not in NEUTRAL - {"seed"} and typed.at(before, key) != typed.at(after, key):
            return key, typed.at(before, key), typed.at(after, key)
    return None


def _text(mapping: dict[str, Any], key: str) -> str:
    """The value of a key as JSON, in which 1 and true differ; empty if it is missing."""
    value = typed.at(mapping, key, absent=...)
    return "" if value is ... else json.dumps(value, sort_keys=True)
