"""Sweeps: many training runs, of several recipes, settings and seeds, on this machine or on a Ray cluster.

- `plan`: which runs there are, and which must come before which.
- `folder`: a sweep's folder, so that the same one goes on and another is refused.
- `work`: one run, a process of its own.
- `local` and `on_ray`: where runs go.
- `schedule`: the loop that starts them, watches them and tells how they end.
- `show`: the table that it shows.
"""
