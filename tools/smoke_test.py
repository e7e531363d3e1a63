"""Try an installed `wirings` the way a new user would; `make package` runs it outside of the checkout.

    python smoke_test.py

It needs only the package and its extra ``train``, and finds files that are missing from a wheel.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import wirings
from wirings import engine
from wirings.train import bundled, recipes


def command(*arguments: str) -> str:
    """Run ``wirings`` with these arguments and return what it printed."""
    done = subprocess.run([sys.executable, "-m", "wirings", *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"wirings {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def train_and_ship(folder: Path) -> None:
    """Wire, train, finalize, compact, save and load a small model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 10),
    )
    wiring = wirings.wire_(model, "dnw", density=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(model(torch.randn(4, 1, 8, 8)), torch.randint(10, (4,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wiring.step(optimizer)
    wirings.finalize_(model)
    example = torch.randn(2, 1, 8, 8)
    expected = model.eval()(example)
    wirings.compact(model, example).save(folder / "model.safetensors")
    for network in (
        wirings.load_compact(folder / "model.safetensors"),
        engine.load(folder / "model.safetensors", threads=1),
    ):
        torch.testing.assert_close(network(example), expected, rtol=1e-4, atol=1e-4)


def main() -> None:
    print(f"wirings {wirings.__version__} from {Path(wirings.__file__).parent}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_and_ship(folder)
        assert len(recipes.names()) > 100, "the recipes are missing"
        assert bundled.names(), "the bundled networks are missing"
        for name in bundled.names():
            assert not wirings.load(name).training, name
        run = str(folder / "run")
        command("train", "digits/static-dnw", "--set", "epochs=1", "--out", run, "--device", "cpu")
        command("show", run, "--html", "--out", str(folder / "page.html"))
        command("profile", run)
        command("demo", "--seeds", "2", "--out", str(folder / "demo.png"))
        assert (folder / "demo.png").stat().st_size > 10_000, "the demo drew nothing"
    print("ok")


if __name__ == "__main__":
    main()
