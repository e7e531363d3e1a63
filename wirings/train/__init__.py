"""Train recipes: settings, data, runs, results and tables.

Imports go one way: `data` → settings, results and the model of a run → `run` (the training loop and its parts) → runs
that were saved → `recipes` → `phases`, `networks` and `tables` → `sweep`.
"""
