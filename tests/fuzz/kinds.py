"""All kinds of cases, by name."""

from tests.fuzz import (
    arguments,
    checkpoints,
    files,
    foreign_files,
    graphs,
    image_sizes,
    interruptions,
    lives,
    operators,
    programs,
    readers,
    settings,
    wire_calls,
)
from tests.fuzz.runner import Fuzzer

FUZZERS: dict[str, Fuzzer] = {
    **files.FUZZERS,
    **checkpoints.FUZZERS,
    **readers.FUZZERS,
    **foreign_files.FUZZERS,
    **settings.FUZZERS,
    **wire_calls.FUZZERS,
    **arguments.FUZZERS,
    **graphs.FUZZERS,
    **programs.FUZZERS,
    **image_sizes.FUZZERS,
    **interruptions.FUZZERS,
    **lives.FUZZERS,
    **operators.FUZZERS,
}
