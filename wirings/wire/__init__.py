"""How edges sit on a model: `wire_`, `finalize_`, `unwire_`, `rewind_` and the handle that `wire_` returns."""
