"""The examples reach the accuracies on record, with the settings that their own search selected."""

import json
import runpy
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from soak import SOAK

from wirings.cli.comparison import RuleOutcome, splits, train

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("digits_*.py"))


def trained_again(example: dict[str, Any], recorded: dict[str, Any], seeds: int) -> RuleOutcome:
    """Train networks with the learning rate and gain on record, without the search for them, for half the epochs."""
    rule, lr, gain = recorded["rule"], recorded["lr"], recorded["gain"]
    settings, (_, test) = example["SETTINGS"], splits()
    if not SOAK:
        settings = replace(settings, epochs=settings.epochs // 2)
    outcome = RuleOutcome(rule, 0, lr, gain)
    for seed in range(seeds):
        network = train(example["network"], rule, lr, gain, seed, test, settings)
        outcome.accuracies.append(network.accuracy)
        outcome.swapped.append(network.swapped)
        outcome.edges = network.edges
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_dnw_beats_random_by_more_than_two_pooled_standard_deviations(name: str) -> None:
    record = json.loads((ROOT / "results" / "examples" / f"{name}.json").read_text())
    chosen = {outcome["rule"]: outcome for outcome in record["outcomes"]}
    assert record["seconds"] < 150  # so that both examples together take less than 5 minutes
    example = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    assert all(len(outcome["accuracies"]) == 5 for outcome in chosen.values())
    seeds = 5 if SOAK else 3
    dnw, random = (trained_again(example, chosen[rule], seeds) for rule in ("dnw", "random"))
    assert dnw.edges == random.edges == chosen["dnw"]["edges"]
    assert min(dnw.swapped) > 0
    assert random.swapped == [0] * seeds
    assert dnw.ahead_of(random) > 2
    mean, std = (f([*chosen["dnw"]["accuracies"]]) for f in (statistics.mean, statistics.stdev))
    other_mean, other_std = (f([*chosen["random"]["accuracies"]]) for f in (statistics.mean, statistics.stdev))
    assert mean - other_mean > 2 * ((std**2 + other_std**2) / 2) ** 0.5


@pytest.mark.slow
def test_pretrained_network_keeps_its_accuracy_with_a_tenth_of_its_weights() -> None:
    record = json.loads((ROOT / "results" / "examples" / "pretrained_digits.json").read_text())
    recorded = {outcome["way"]: outcome for outcome in record["outcomes"]}
    assert all(len(outcome["accuracies"]) == 5 for outcome in recorded.values())
    example = runpy.run_path(str(ROOT / "examples" / "pretrained_digits.py"))
    _, test = splits()
    dense = example["pretrained"](test, 0)
    before = {name: value.clone() for name, value in dense.state_dict().items()}
    found = {
        way: example["continue_training"](way, dense, test, recorded[way]["lr"], 0)
        for way in ("cut", "fine_tune", "dnw")
    }
    assert {edges for _, edges in found.values()} == {882} == {recorded["dnw"]["edges"]}
    assert found["dnw"][0] > found["cut"][0] + 20
    assert found["dnw"][0] > example["accuracy"](dense, test) - 2
    assert all(torch.equal(dense.state_dict()[name], value) for name, value in before.items()), "only copies are wired"
    means = {way: statistics.mean(outcome["accuracies"]) for way, outcome in recorded.items()}
    assert means["dnw"] > means["dense"] - 1
    assert means["dnw"] > means["fine_tune"] > means["cut"]


@pytest.mark.parametrize("name", [*EXAMPLES, "pretrained_digits"])
def test_examples_have_a_help_text(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(ROOT / "examples" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(path, run_name="__main__")
    assert ended.value.code == 0
    assert "--seeds" in capsys.readouterr().out
