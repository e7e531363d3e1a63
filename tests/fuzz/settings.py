"""Random settings and command lines: each succeeds, or ends with one sentence and the exit status of a mistake."""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.runner import MISTAKE, Fuzzer
from wirings import WiringError, models, rules
from wirings.train import data, recipes
from wirings.train.run import loop
from wirings.train.settings import Settings, from_mapping, to_mapping, with_overrides

VALUES = (
    *("0", "1", "-1", "2", "0.5", "1.5", "1e-3", "1e400", "nan", ".inf", "-.inf", "null", "~", "true", "no", "''", "x"),
    *("[]", "[1]", "[0.5, 0.9]", "{}", "{a: 1}", "{density: 0.1}", "[[1]]", "2024-01-01", "!!timestamp z", "!!set {a}"),
    *(
        "!!python/object:os.system x",
        "&a [*a]",
        "*a",
        "9" * 50,
        "9" * 5000,
        "0x10",
        "1_0",
        "é",
        "\u202e",
        "\x1b[2J",
        "\0",
    ),
    *(
        "a: b",
        "[",
        "{",
        "'",
        "|",
        "- 1",
        "a" * 300,
        "../x",
        "/",
        "dnw",
        "sgd",
        "adamw",
        "cosine",
        "synthetic",
        "digits",
    ),
    *("0.1,0.2", "cubic", "{schedule: cubic}", "{steps: 3}", "[1, 8, 8]", "10", "64", "100000", "os:system"),
    *("2:4", "'2:4'", "'4:2'", "32x32", "'4x4, padded'", "row", "free", "0x0", "{structure: row, density: 0.1}"),
)
"""Texts as values of settings and options."""


def names_of(mapping: Any, prefix: str = "") -> list[str]:
    """The names of all settings."""
    found = []
    for key, value in mapping.items():
        found += names_of(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]
    return found


def prepare(folder: Path) -> tuple[list[str], list[str]]:
    """The names of recipes and of settings."""
    found = recipes.names()
    keys = {key for name in found for key in names_of(to_mapping(recipes.get(name).settings))}
    more = {
        f"{part}.options.{key}"
        for part in ("model", "rule", "data")
        for key in ("x", "every", "classes", "density", "structure")
    }
    return found, sorted(keys | more)


def text_of(draw: random.Random, keys: list[str]) -> str:
    """A change of a setting."""
    key = draw.choice(keys)
    if draw.random() < 0.1:
        key = draw.choice(("", ".", "x", f"{key}.x", key[:-1], key.upper(), f"{key}.", "settings", "é" * 50, "a" * 300))
    value = draw.choice(VALUES)
    if key == "rule.name":
        value = draw.choice((value, *rules.names()))
    if key == "model.name":
        value = draw.choice((value, *models.names()))
    if key == "data.name":
        value = draw.choice((value, *data.names()))
    return f"{key}{draw.choice(('=', '=', '=', '=', '=', '=', '=', ' = ', '', '=='))}{value}"


def changed_settings(given: tuple[list[str], list[str]], folder: Path, seed: int) -> str:
    """Change the settings of a recipe."""
    draw = random.Random(seed)
    names, keys = given
    before = recipes.get(draw.choice(names)).settings
    try:
        after, _ = with_overrides(before, [text_of(draw, keys) for _ in range(draw.choice((1, 1, 2, 3)))])
        again = from_mapping(to_mapping(after))
    except WiringError as error:
        said = str(error)
        return "refused" if 0 < len(said) < 2000 else f"{MISTAKE}: a long message: {said[:200]}"
    if not isinstance(after, Settings) or to_mapping(again) != to_mapping(after):
        return f"{MISTAKE}: the settings change when they are saved and read"
    return "accepted"


def prepare_runs(folder: Path) -> tuple[list[str], list[str]]:
    """The names of recipes and of settings. Two finished runs are written, on images and on text."""
    (folder / "input.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    text = [f"data.directory={folder}", "data.options={context: 8, epoch_steps: 2, sha256: null}", "batch=4", "steps=2"]
    text += [f"model.options.{size}" for size in ("layers=1", "heads=2", "width=32", "context=8")]
    text += ["schedule.warmup_steps=1"]
    for name, recipe, changes in (("images", "digits/static-dnw", TINY[:-1]), ("text", "shakespeare/dnw-10", text)):
        loop.train(recipe, with_overrides(recipes.get(recipe).settings, changes)[0], folder / name, device="cpu")
    return prepare(folder)


TINY = (
    "data.name=synthetic", "data.options={shape: [1, 8, 8], examples: 20, test_examples: 10}", "batch=10", "epochs=1",
    "history_every=0",
)  # fmt: skip
"""Settings that make a run of digits/static-dnw short."""
OPTIONS: dict[str, tuple[str, ...]] = {
    "recipes": ("--rule", "--model", "--dataset", "--json"),
    "train": (
        "--seed",
        "--set",
        "--data",
        "--start",
        "--max-minutes",
        "--device",
        "--results",
        "--overwrite",
        "--resume",
    ),
    "sweep": ("--seed", "--set", "--jobs", "--per-gpu", "--on", "--data", "--device", "--retries", "--max-minutes"),
    "tune": ("--seed", "--set", "--jobs", "--per-gpu", "--on", "--data", "--device", "--results", "--max-minutes"),
    "eval": ("--best", "--data", "--device", "--json"),
    "bleu": ("--results", "--overwrite"),
    "predict": ("--best", "--device", "--json"),
    "generate": ("--prompt", "--length", "--temperature", "--top-k", "--seed", "--best", "--device"),
    "table": ("--results", "--markdown", "--no-count", "--json"),
    "profile": ("--trained", "--best", "--image-size", "--classes", "--json"),
    "compact": ("--best", "--image-size"),
    "ship": ("--best", "--data", "--dtype", "--threads", "--image-size", "--json", "--int8"),
    "push": ("--result", "--private", "--best"),
    "show": ("--html", "--pictures", "--svg", "--whole", "--heads"),
    "data": ("--data",),
}
FLAGS = {
    "--json", "--overwrite", "--resume", "--best", "--markdown", "--no-count", "--trained", "--html", "--svg",
    "--whole", "--private", "--int8", "--help", "--version",
}  # fmt: skip


def command_line(draw: random.Random, keys: list[str], folder: Path) -> list[str]:
    """A command with arguments of which some are valid. It does not download, and trains nothing that takes long."""
    command = draw.choice(sorted(OPTIONS))
    known = {
        "recipes": ("table1", "digits/*", "*"), "train": ("digits/static-dnw",), "sweep": ("digits/static-dnw",),
        "tune": ("digits/static-dnw", "digits/*"),
        "table": ("1", "4", "ste", "text"), "profile": ("digits/static-dnw", "table1/static-dnw"),
        "data": ("imagenet",), "generate": (str(folder / "text"), str(folder / "images")),
    }.get(command, ("table1/static-dnw", str(folder / "images"), str(folder / "text"), str(folder)))  # fmt: skip
    words = [command]
    for _ in range(draw.choice((0, 1, 1, 1, 1, 1, 2))):
        odd = "x" if command == "data" else draw.choice(VALUES)
        words.append(odd if draw.random() < 0.25 else draw.choice(known))
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        option = (
            draw.choice((*OPTIONS[command], "--x", "--help", "--version"))
            if draw.random() < 0.95
            else draw.choice(VALUES)
        )
        words.append(option)
        if option not in FLAGS:
            words.append(text_of(draw, keys) if option == "--set" else draw.choice(VALUES))
    out = str(folder / draw.choice(("a", "b", "c.safetensors", "d.html", "x" * 300)))
    if command in ("train", "sweep", "tune"):
        words += ["--out", out, *(word for change in TINY for word in ("--set", change))]
        words += ["--max-minutes", "0"] if command == "train" else ["--dry-run"]
    elif command in ("show", "compact", "ship") and draw.random() < 0.5:
        words += ["--out", out]
    if command == "ship":
        words += ["--quick", "--examples", "0"]
    return words


def command(given: tuple[list[str], list[str]], folder: Path, seed: int) -> str:
    """Run a command line in this process."""
    from wirings.__main__ import main

    draw = random.Random(seed)
    words = command_line(draw, given[1], folder)
    os.chdir(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.argv = ["wirings", *words]
    out, err = io.StringIO(), io.StringIO()
    status: Any = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            main()
    except SystemExit as ended:
        status = ended.code
    except BaseException as error:
        return f"{MISTAKE}: {type(error).__name__}: {str(error)[:200]} ({' '.join(words)[:300]!r})"
    finally:
        torch.set_default_dtype(torch.float32)
    said = f"{out.getvalue()}{err.getvalue()}{status if isinstance(status, str) else ''}"
    if "Traceback" in said or "\x1b" in said:
        return f"{MISTAKE}: {said[-200:]!r} ({' '.join(words)[:300]!r})"
    if status in (0, None):
        return f"{words[0]}: done"
    if isinstance(status, str) and 0 < len(status) < 3000:
        return f"{words[0]}: refused"
    return f"{words[0]}: usage" if status == 2 and said else f"{MISTAKE}: exit {status!r} ({' '.join(words)[:300]!r})"


FUZZERS = {
    "setting changes": Fuzzer(prepare, changed_settings, chunk=5000, short=2000),
    "command lines": Fuzzer(prepare_runs, command, chunk=200, seconds=120.0, short=50),
}
