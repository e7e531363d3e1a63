"""The demo: its data, the comparison, the command and the picture."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import wirings
from wirings.__main__ import main
from wirings.cli import comparison
from wirings.cli.app import app
from wirings.cli.comparison import ComparisonSettings, compare, splits
from wirings.draw.columns import live_nodes
from wirings.train.data import digits

RECORD = Path(__file__).parents[2] / "results" / "demo.json"


def test_embedded_digits() -> None:
    images, labels = digits.load()
    assert images.shape == (1797, 1, 8, 8)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    # The first image, a zero, as in the source.
    assert (images[0, 0, 0] * 16).int().tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert int(labels[0]) == 0


def test_splits_are_disjoint() -> None:
    validation, test = splits()
    assert [len(s) for s in (validation.y, validation.y_test, test.y, test.y_test)] == [1100, 300, 1400, 397]
    assert torch.equal(torch.cat([validation.x, validation.x_test]), test.x)


@pytest.mark.slow
def test_dnw_is_ahead_by_more_than_two_pooled_standard_deviations() -> None:
    """Uses the learning rates that the recorded demo chose, which halves the time."""
    chosen = {outcome["rule"]: outcome["lr"] for outcome in json.loads(RECORD.read_text())["outcomes"]}
    dnw, random = (
        compare(ComparisonSettings(trial_seeds=1, learning_rates=(chosen[rule],)), [rule])[0]
        for rule in ("dnw", "random")
    )
    assert dnw.edges == random.edges == 327 + 1310 + 51
    assert len(dnw.accuracies) == len(random.accuracies) == 5
    assert min(dnw.swapped) > 500
    assert random.swapped == [0] * 5
    pooled = ((dnw.std**2 + random.std**2) / 2) ** 0.5
    assert dnw.mean - random.mean > 2 * pooled


@pytest.mark.slow
def test_command_writes_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches fewer learning rates than the demo does, which takes most of its time."""
    fewer = partial(ComparisonSettings, learning_rates=(0.01, 0.1), trial_seeds=1)
    monkeypatch.setattr(comparison, "ComparisonSettings", fewer)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["demo", "--seeds", "2", "--out", "two.png"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "dnw is ahead by" in done.stdout
    picture = (tmp_path / "two.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 50_000


@pytest.mark.slow
def test_rejects_invalid_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "wirings", "demo", "--seeds", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "Error: seeds must be at least 2, since their standard deviation is shown, got 1."
    monkeypatch.chdir(tmp_path)
    assert wirings.__version__ in CliRunner().invoke(app, ["--version"]).stdout
    assert CliRunner().invoke(app, ["demos"]).exit_code == 2
    monkeypatch.setattr(sys, "argv", ["wirings", "demo", "--out", "nowhere/two.png"])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == "Error: --out must be a .png file in an existing folder, got nowhere/two.png."


def test_live_nodes_of_a_small_network() -> None:
    first = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 0]], dtype=bool)  # 0→0, 1→1
    second = np.array([[1, 0, 1]], dtype=bool)  # 0→0, 2→0: node 1 has no successor, node 2 no predecessor
    alive = live_nodes([first, second])
    assert [a.astype(int).tolist() for a in alive] == [[1, 0, 0], [1, 0, 0], [1]]
