"""Train a sparse network on the embedded digits with Lightning: wire the module and pass a callback to the trainer.

pip install wirings lightning
python examples/lightning_digits.py [--epochs 10]
"""

import argparse

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import wirings
from wirings.train.data import digits
from wirings.train.integrations.lightning import WiringCallback


class Digits(lightning.LightningModule):
    """An ordinary LightningModule, without any code for wirings."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        self.log("accuracy", (self.model(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def main(epochs: int = 10) -> tuple[float, nn.Module]:
    """Train, and return the test accuracy in percent and the finalized sparse network."""
    images, labels = digits.load()
    data = TensorDataset(images, labels)
    train, test = torch.utils.data.random_split(data, [1400, 397], torch.Generator().manual_seed(0))

    module = Digits()
    wiring = wirings.wire_(module, "dnw", density=0.05)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=[WiringCallback(wiring)],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(train, batch_size=100, shuffle=True))
    (outcome,) = trainer.test(module, DataLoader(test, batch_size=397), verbose=False)
    return 100 * outcome["accuracy"], module.model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    accuracy, model = main(parser.parse_args().epochs)
    weights = [m.weight for m in model if isinstance(m, nn.Linear)]
    edges, possible = sum(int(w.count_nonzero()) for w in weights), sum(w.numel() for w in weights)
    print(f"{edges:,} of {possible:,} edges: test accuracy {accuracy:.1f} %")
