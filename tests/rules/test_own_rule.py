"""A rule from outside the package: one file, one line of registration, and the contract tests find it."""

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
MODULE = '''
"""A rule that ranks each weight relative to the others into the same node."""

import wirings
from wirings import rules


@rules.register
class Relative(rules.Rule):
    name = "relative_from_outside"
    reaches = "all"

    def real(self, weight, edges):
        magnitude = weight.detach().abs()
        mean = magnitude.flatten(1).mean(1).view(-1, *[1] * (weight.dim() - 1))
        return wirings.choose(magnitude / mean, edges.k, edges.within())

    def forward(self, weight, edges):
        return wirings.straight_through(weight, self.real(weight, edges), edges.allowed)
'''


def test_contract_tests_find_it(tmp_path: Path) -> None:
    (tmp_path / "relative_from_outside.py").write_text(MODULE)
    paths = os.pathsep.join([str(tmp_path), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    contract = TESTS / "rules" / "test_contract.py"
    command = [sys.executable, "-m", "pytest", "-p", "relative_from_outside", "-p", "no:cacheprovider", "-q"]
    command += ["-k", "relative_from_outside and not compil and not global", str(contract)]
    environment = {**os.environ, "PYTHONPATH": paths, "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed.group(1)) > 20, done.stdout[-3000:]
