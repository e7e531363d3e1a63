"""Train a small sparse vision transformer on the embedded digits with the Hugging Face Trainer.

pip install wirings transformers accelerate
python examples/trainer_digits.py [--epochs 10]
"""

import argparse
import tempfile

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import wirings
from wirings.train.data import digits
from wirings.train.integrations.hugging_face import WiringTrainerCallback


def main(epochs: int = 10) -> tuple[float, nn.Module]:
    """Train, and return the test accuracy in percent and the finalized sparse network."""
    images, labels = digits.load()
    images = images.view(-1, 1, 8, 8)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, Tensor]] = [{"pixel_values": images[i], "labels": labels[i]} for i in order]

    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_labels=10,
    )  # fmt: skip
    model = ViTForImageClassification(config)
    wiring = wirings.wire_(model, "dnw", density=0.1, skip=["*.projection", "classifier"])
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=50,
            learning_rate=2e-3,
            lr_scheduler_type="cosine",
            warmup_steps=50,
            logging_steps=28,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        callback = WiringTrainerCallback(wiring)
        trainer = Trainer(model=model, args=arguments, train_dataset=rows[:1400], callbacks=[callback])
        trainer.train()
        predicted = trainer.predict(rows[1400:])
    return 100 * float((predicted.predictions.argmax(1) == predicted.label_ids).mean()), model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    accuracy, model = main(parser.parse_args().epochs)
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    edges, possible = sum(int(w.count_nonzero()) for w in weights), sum(w.numel() for w in weights)
    print(f"{edges:,} of {possible:,} edges: test accuracy {accuracy:.1f} %")
