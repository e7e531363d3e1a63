"""Callbacks for other training loops: `lightning`, and `hugging_face` for the Trainer of transformers.

Each takes the handle that `wirings.wire_` gave, and does what a loop of one's own would do with it: `Wiring.plan`
before training, `Wiring.step` after every optimizer step, edges swapped to the log, the handle's state to checkpoints,
and `wirings.finalize_` at the end.
"""
