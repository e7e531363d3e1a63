"""Callbacks for other training loops: `lightning` for Lightning, `hugging_face` for the Trainer of transformers.

`lightning.WiringCallback` and `hugging_face.WiringTrainerCallback` take the handle returned by `wirings.wire_` and do
what a training loop of your own would do with it: call `Wiring.plan` before training and `Wiring.step` after every
optimizer step, log swapped edges, store the handle's state in checkpoints, and call `wirings.finalize_` at the end.
"""
