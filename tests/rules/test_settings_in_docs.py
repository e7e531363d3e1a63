"""The table of settings in docs/rules.md lists all rules that have settings, with their defaults."""

import inspect
import re
from pathlib import Path

from wirings import rules

DOCS = Path(__file__).parents[2] / "docs" / "rules.md"


def table(heading: str) -> dict[str, str]:
    """The first table below a heading: its rows by the names in their first cell. It ends with the first other line."""
    lines = DOCS.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].strip().splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("|"))
    rows = [re.split(r"(?<!\\)\|", line)[1:3] for line in lines[2:end]]
    return {name: settings for names, settings in rows for name in re.findall(r"`(\w+)`", names)}


def settings_of(rule: str) -> dict[str, object]:
    parameters = inspect.signature(type(rules.get(rule)).__init__).parameters
    return {name: p.default for name, p in parameters.items() if name not in ("self", "steps", "args", "kwargs")}


def test_every_rule_with_settings_has_a_row() -> None:
    assert set(table("Settings")) == {rule for rule in rules.names() if settings_of(rule)}


def test_a_rows_settings_are_the_rules() -> None:
    for rule, row in table("Settings").items():
        named = dict(re.findall(r"`(\w+)` \(([\d.e-]+)\)", row))
        assert set(named) <= set(settings_of(rule)), rule
        for setting, default in named.items():
            assert float(default) == settings_of(rule)[setting], (rule, setting)
