"""The settings of a training run: typed, checked, and documented by the texts below their fields."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from wirings import models, rules
from wirings.errors import WiringError, unknown
from wirings.train import typed
from wirings.train.text import parse_yaml
from wirings.train.typed import Typed
from wirings.utils.importing import check_import_path, is_import_path

NEUTRAL = frozenset(
    {"seed", "data.directory", "data.workers", "checkpoint_every", "checkpoint_epochs", "history_every"}
)
"""Settings that leave a recipe what it is: with other values of these, a run is still the recipe's."""
_NOT_DATA_OPTIONS = ("batch", "device", "seed", "rank", "world")
"""What a data set is told by the run itself, besides the fields of `DataSettings`."""


@dataclass(frozen=True)
class ModelSettings(Typed):
    """Which model, and how it is made."""

    prefix: ClassVar[str] = "model."
    name: str
    """A model's name: one of `wirings.models.names()`, or ``package.module:function`` for a function of your own."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the model is made with, such as edges or steps."""

    def check(self) -> None:
        if is_import_path(self.name):
            check_import_path(self.name, "model.name")
        elif self.name not in models.names():
            raise unknown("model", self.name, models.names())
        if taken := {"rule", "name"} & self.options.keys():
            raise WiringError(f"model.options cannot hold {min(taken)!r}: set rule.name and model.name instead.")


@dataclass(frozen=True)
class RuleSettings(Typed):
    """Which rule chooses the wiring, and how it is made."""

    prefix: ClassVar[str] = "rule."
    name: str = "dnw"
    """A rule's name: one of `wirings.rules.names()`."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the rule is made with."""

    def check(self) -> None:
        if "rule" in self.options:
            raise WiringError("rule.options cannot hold 'rule'. Set rule.name instead.")
        rules.get(self.name, **self.options)  # an error for a name or an option that there is not


@dataclass(frozen=True)
class DataSettings(Typed):
    """Which images, and how they are read."""

    prefix: ClassVar[str] = "data."
    name: str = "cifar10"
    """A data set's name, or ``package.module:function`` for a function of your own."""
    directory: str | None = None
    """The folder that holds the data; null for the data set's usual one."""
    augment: bool = True
    """Whether training images are cropped and flipped at random."""
    workers: int = 4
    """Processes that read images, for data that does not fit in memory."""
    image_size: int | None = None
    """Height and width of an image in pixels; null for the data set's own."""
    skip_corrupt: bool = False
    """Whether images that cannot be read are left out; otherwise they end the run."""
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
class OptimizerSettings(Typed):
    """Stochastic gradient descent."""

    prefix: ClassVar[str] = "optimizer."
    lr: float = 0.1
    """The learning rate that the schedule is a multiple of."""
    momentum: float = 0.9
    """The part of the last step that is taken again."""
    nesterov: bool = False
    """Whether the momentum is Nesterov's."""
    weight_decay: float = 1e-4
    """The multiple of a weight that is added to its gradient."""
    weight_decay_edges: float | None = None
    """The same for edges, hallucinated ones included; null: as the rest."""
    weight_decay_norms: bool = True
    """Whether norms and biases decay as well."""
    no_decay: tuple[str, ...] = ()
    """Patterns of parameters and modules that do not decay, such as ``*.bn?``; as in ``skip`` of `wirings.wire_`."""

    def check(self) -> None:
        self.need("lr", self.lr > 0, "above 0")
        self.need("momentum", 0 <= self.momentum < 1, "at least 0 and below 1")
        self.need("weight_decay", self.weight_decay >= 0, "0 or more")
        self.need("weight_decay_edges", (self.weight_decay_edges or 0) >= 0, "0 or more")
        if self.nesterov and self.momentum == 0:
            raise WiringError("optimizer.nesterov needs a momentum above 0, but optimizer.momentum is 0.")


@dataclass(frozen=True)
class ScheduleSettings(Typed):
    """How the learning rate changes."""

    prefix: ClassVar[str] = "schedule."
    kind: Literal["constant", "multistep", "cosine"] = "constant"
    """Constant; multistep, multiplied by the factor at milestones; or cosine, down to 0 at the end."""
    milestones: tuple[int, ...] = ()
    """The epochs before which a multistep schedule multiplies, counted from 0."""
    factor: float = 0.1
    """What a multistep schedule multiplies by."""
    warmup_epochs: float = 0.0
    """Epochs at the start in which the learning rate rises in a straight line from 0."""
    per: Literal["step", "epoch"] = "step"
    """Whether cosine and warm-up move every step, or once an epoch."""

    def check(self) -> None:
        increasing = all(a < b for a, b in zip((0, *self.milestones), self.milestones, strict=False))
        self.need("milestones", increasing, "epochs from 1 on, each later than the one before")
        self.need("factor", self.factor > 0, "above 0")
        self.need("warmup_epochs", self.warmup_epochs >= 0, "0 or more")
        if self.kind == "multistep" and not self.milestones:
            raise WiringError("schedule.kind is 'multistep', which needs schedule.milestones, such as [80, 120].")
        if self.per == "epoch":
            self.need("warmup_epochs", self.warmup_epochs.is_integer(), "whole where schedule.per is 'epoch'")

    def factor_at(self, step: int, steps_per_epoch: int, epochs: int) -> float:
        """The multiple of the base learning rate at optimizer step ``step`` (from 0) of ``epochs`` epochs."""
        unit = steps_per_epoch if self.per == "epoch" else 1
        at, end = step // unit, epochs * steps_per_epoch // unit
        warm = round(self.warmup_epochs * steps_per_epoch / unit)
        if at < warm:
            return (at + 1) / warm
        if self.kind == "multistep":
            return self.factor ** sum(step >= epoch * steps_per_epoch for epoch in self.milestones)
        if self.kind == "cosine":
            return (1 + math.cos(math.pi * min((at - warm) / max(end - warm, 1), 1.0))) / 2
        return 1.0


@dataclass(frozen=True)
class StartSettings(Typed):
    """What training starts from: a new network, or one that another recipe has trained."""

    prefix: ClassVar[str] = "start."
    recipe: str | None = None
    """The recipe that is trained first, with the same seed; its weights decide the wiring. Null: a new network."""
    weights: Literal["initial", "trained"] = "trained"
    """Which of that network's weights training then starts from: those it had at first, or at the end."""

    def check(self) -> None:
        self.need("recipe", bool(self.recipe), "a recipe's name, or a YAML file")


@dataclass(frozen=True)
class Settings(Typed):
    """Everything that a training run depends on."""

    model: ModelSettings
    rule: RuleSettings = field(default_factory=RuleSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    start: StartSettings = field(default_factory=StartSettings)
    epochs: int = 160
    """How often all training images are seen."""
    batch: int = 512
    """Images an optimizer step, over all processes together."""
    accumulate: int = 1
    """Parts that a batch is taken in, one after the other, to save memory."""
    label_smoothing: float = 0.0
    """The part of a label that is spread over all classes."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What the model computes in; weights are float32 in all."""
    norm_scales: Literal["ones", "uniform"] = "ones"
    """What learned scales of batch and instance norms start from: 1, or uniform between 0 and 1, as in PyTorch before
    1.2 and so in the paper's experiments."""
    channels_last: bool = False
    """Whether maps lie in memory pixel by pixel, which convolutions on a GPU may be faster with."""
    fast: bool = False
    """Whether the whole step is compiled and captured in a CUDA graph, where possible."""
    ema: float | None = None
    """The part of a running average of the weights that stays at a step; the average is evaluated. Null: no average."""
    clip: float | None = None
    """The largest norm of the gradient; null: as it comes."""
    seed: int = 0
    """Of all that is random."""
    evaluate_every: int = 1
    """Epochs from one evaluation on the test images to the next; the last epoch always has one."""
    checkpoint_epochs: int = 1
    """Epochs from one checkpoint to the next; the last epoch always has one."""
    checkpoint_every: int | None = None
    """Steps from one checkpoint to the next within an epoch; null: none but at the ends of epochs."""
    history_every: int | None = None
    """Steps from one record of the wiring to the next in history.wirings; 0: no history; null: 200 records, or fewer
    of a large wiring."""

    def check(self) -> None:
        for name in ("epochs", "batch", "accumulate", "evaluate_every", "checkpoint_epochs", "checkpoint_every"):
            value = getattr(self, name)
            self.need(name, value is None or value >= 1, "1 or more")
        self.need("history_every", (self.history_every or 0) >= 0, "0 or more")
        self.need("accumulate", self.accumulate <= self.batch, f"at most the batch, {self.batch}")
        self.need("label_smoothing", 0 <= self.label_smoothing < 1, "at least 0 and below 1")
        self.need("ema", 0 < (self.ema or 0) < 1, "above 0 and below 1")
        self.need("clip", (self.clip or 0) > 0, "above 0")
        self.need("seed", 0 <= self.seed < 2**63, "at least 0 and below 2**63")
        if self.schedule.warmup_epochs > self.epochs:
            raise WiringError(
                f"schedule.warmup_epochs must fit into the run, but it is {self.schedule.warmup_epochs:g} "
                f"and epochs is {self.epochs}."
            )


def from_mapping(mapping: Any) -> Settings:
    """Settings from what a YAML file holds; what it leaves out has its default."""
    return typed.build(Settings, mapping)


def to_mapping(settings: Settings) -> dict[str, Any]:
    """All settings as plain values, for YAML and JSON; `from_mapping` gives the same settings back."""
    mapping: dict[str, Any] = typed.to_plain(settings)
    return mapping


def documented() -> dict[str, str]:
    """The help text of every setting, by its dotted name."""
    return typed.documented(Settings)


def with_overrides(settings: Settings, overrides: Iterable[str]) -> tuple[Settings, dict[str, Any]]:
    """Settings changed by texts such as ``"optimizer.lr=0.2"``, whose values are YAML.

    Also gives, by dotted name, what is now different from before; without the `NEUTRAL` settings.
    """
    before, after, keys = to_mapping(settings), to_mapping(settings), []
    for text in overrides:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key:
            raise WiringError(f"{text!r} changes no setting: write name=value, such as optimizer.lr=0.2.")
        typed.put(after, key, parse_yaml(value, f"the value of {key}"), Settings)
        keys.append(key)
    changed = from_mapping(after)
    after = to_mapping(changed)
    different = [key for key in keys if key not in NEUTRAL and _text(before, key) != _text(after, key)]
    return changed, {key: typed.at(after, key) for key in different}


def first_difference(then: Settings, now: Settings) -> tuple[str, Any, Any] | None:
    """The first setting in which two runs are not the same one, with both its values; None if there is none."""
    before, after = to_mapping(then), to_mapping(now)
    for key in typed.leaves(Settings):
        if key not in NEUTRAL - {"seed"} and typed.at(before, key) != typed.at(after, key):
            return key, typed.at(before, key), typed.at(after, key)
    return None


def _text(mapping: dict[str, Any], key: str) -> str:
    """The value of a key as text, in which 1 and true are not equal; empty if there is none."""
    value = typed.at(mapping, key, absent=...)
    return "" if value is ... else json.dumps(value, sort_keys=True)
