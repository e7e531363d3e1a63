"""Fine-tune a small GPT-2 while it learns which tenth of its weights to keep, with the Hugging Face Trainer.

The model is first trained dense on one text, then wired, and trained on another one while its density falls. Both texts
are modules of Python's standard library, read as bytes, so nothing is downloaded.

pip install wirings transformers accelerate
python examples/finetune_gpt.py [--steps 300]
"""

import argparse
import importlib
import inspect
import math
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel, Trainer, TrainingArguments

import wirings
from wirings import rules
from wirings.train.integrations.hugging_face import WiringTrainerCallback

LENGTH = 64  # bytes in a line of text


def lines_of(module: str) -> list[dict[str, Tensor]]:
    """The source of a module as lines of bytes."""
    text = inspect.getsource(importlib.import_module(module)).encode()
    rows = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def train(
    model: PreTrainedModel, rows: list[dict[str, Tensor]], steps: int, rate: float, *callbacks: WiringTrainerCallback
) -> float:
    """Train on the first nine tenths of the text; return the bits per byte on the rest."""
    cut = len(rows) * 9 // 10
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=128,
            learning_rate=rate,
            lr_scheduler_type="cosine",
            warmup_steps=steps // 10,
            max_grad_norm=0.0,  # the Trainer would count the gradients of hallucinated edges, and clip harder
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=rows[:cut], eval_dataset=rows[cut:], callbacks=[*callbacks])
        trainer.train()
        return trainer.evaluate()["eval_loss"] / math.log(2)


def main(steps: int, folder: Path) -> tuple[float, PreTrainedModel]:
    """Train, fine-tune and save; return the bits per byte of the fine-tuned network, and the network itself."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    dense = GPT2LMHeadModel(config)
    print(f"pretrained on argparse: {train(dense, lines_of('argparse'), steps, 3e-3):.2f} bits per byte")
    dense.save_pretrained(folder / "pretrained")

    model = AutoModelForCausalLM.from_pretrained(folder / "pretrained")
    rule = rules.get("soft_threshold", schedule={"kind": "cubic", "end": 0.5})
    wiring = wirings.wire_(model, rule, density=0.1, skip=["lm_head"])  # the head is tied to the embedding
    bits = train(model, lines_of("subprocess"), steps, 3e-3, WiringTrainerCallback(wiring, finalize=False))
    model.save_pretrained(folder / "wired")  # with its wiring: this could be trained further
    print(f"{wiring}\nfine-tuned on subprocess: {bits:.2f} bits per byte")

    model = AutoModelForCausalLM.from_pretrained(folder / "wired")  # the network in use, with exact zeros
    wirings.rewire_(model, folder / "wired")  # and all its edges
    wirings.finalize_(model).save_pretrained(folder / "final")  # a plain model, smaller than the wired one
    return bits, model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, default=Path("finetuned_gpt"))
    options = parser.parse_args()
    _, model = main(options.steps, options.folder)
    prompt = torch.tensor([list(b"    def ")])
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=56, do_sample=False)
    print(bytes(text[0].tolist()).decode(errors="replace"))
