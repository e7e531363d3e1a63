"""A training run: `loop.Run` and its parts, one module each.

`loop` puts the parts together and goes through the epochs.

- `step` makes one training step, `captured_step` the same in a CUDA graph, with the SGD of `optimizer`.
- `checkpoint` reads and writes the files, `saving` decides which and resumes from the last one.
- `progress` holds a run's progress, `summary` makes its result, `evaluate` measures the accuracy.
- `log` prints and writes ``log.csv``, `recording` writes the history of the wiring.
- `folder` has the names of a run's files.
"""
