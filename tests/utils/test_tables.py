"""Text tables: alignment, rules, footers, Markdown."""

import pytest
import torch

import wirings
from wirings.utils.tables import markdown_table, text_table

HEADER = ["layer", "shape", "edges"]
ROWS = [["conv", "8×3", 1024], ["fc", "10×8", None]]


def test_text_aligns_names_left_and_numbers_right():
    assert text_table(HEADER, ROWS) == [
        "layer  shape  edges",
        "-----  -----  -----",
        "conv   8×3    1,024",
        "fc     10×8",
    ]


def test_text_with_footer_and_without_rule():
    total = [["total", "", 1024]]
    assert text_table(HEADER, ROWS, footer=total)[-2:] == ["-----  -----  -----", "total         1,024"]
    lines = text_table(HEADER, ROWS, footer=total, rule=False)
    assert [line.split()[0] for line in lines] == ["layer", "conv", "fc", "total"]


def test_align_by_hand():
    assert text_table(["a", "bb"], [["1", "x"], ["22", "y"]], align="lr", rule=False) == ["a   bb", "1    x", "22   y"]


@pytest.mark.parametrize("cell", ["7", "1,024", "-3.5", "+0.4", "1e-05", "89.5 ± 0.2 %", "12 ms", "0.01%", "42.1M"])
def test_numbers_with_units_align_right(cell):
    assert text_table(["a long title"], [[cell]], rule=False)[1] == cell.rjust(12)


@pytest.mark.parametrize("cell", ["3×3", "conv1", "1 of 3", "(attention)", "step 3"])
def test_text_with_digits_aligns_left(cell):
    assert text_table(["a long title"], [[cell]], rule=False)[1] == cell


def test_markdown():
    assert markdown_table(["a", "n"], [["x|y", 1000]], footer=[["total", 1000]]) == [
        "| a | n |",
        "| --- | ---: |",
        "| x\\|y | 1,000 |",
        "| total | 1,000 |",
    ]


def test_a_table_without_rows_is_its_header():
    assert text_table(["a", "b"], []) == ["a  b", "-  -"]
    assert markdown_table(["a", "b"], []) == ["| a | b |", "| --- | --- |"]


def test_rejects_rows_and_alignments_of_the_wrong_length():
    with pytest.raises(wirings.WiringError, match="a table of 2 columns has a row of 1 cells"):
        text_table(["a", "b"], [["x"]])
    with pytest.raises(wirings.WiringError, match="align must have 'l' or 'r' for each of 2 columns, got 'lcr'"):
        markdown_table(["a", "b"], [], align="lcr")


def test_control_characters_are_shown():
    name = "a\x1b[2J\nb"
    assert text_table(["layer"], [[name]])[2] == r"a\x1b[2J\nb"
    assert markdown_table(["layer"], [[name]])[2] == r"| a\x1b[2J\nb |"
    model = torch.nn.Sequential()
    model.add_module("a\x1b[2Jb", torch.nn.Linear(4, 3))
    assert r"a\x1b[2Jb" in str(wirings.wire_(model, "dnw", density=0.5))
