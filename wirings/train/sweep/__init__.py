"""Sweeps: many training runs over recipes, settings and seeds, on this machine or on a Ray cluster.

- `plan`: which runs a sweep has, and which of them start from others.
- `preflight`: checks for all runs before the first one starts.
- `folder`: the folder of a sweep, so that the same sweep continues there and another one is rejected.
- `process`: a run as a process of its own.
- `local` and `on_ray`: where runs are executed.
- `packing`: how many runs share a GPU; `gpus` and `mps`: what that needs from NVIDIA's tools.
- `schedule`: the loop that starts the runs, watches them and reports how they end.
- `display`: the tables that a sweep shows.
"""
