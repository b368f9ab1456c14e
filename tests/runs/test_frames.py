"""Tables of text keep to the terminal's width, and break no cell or word."""

import io

import pytest
from rich.console import Console

from hpcjax.runs.frames import Frame

HEADS = ("row", "ratio to the baseline", "steps", "missed, of all")
ROWS = [
    ("sgd, slow", "1.00 [0.9, 1.1]", "5", "0 of 3"),
    ("ours", "2.5", "49", "1 of 3"),
]


def show(frame, width):
    file = io.StringIO()
    Console(file=file, width=width).print(frame)
    lines = file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return lines


def whole(width, rows=ROWS):
    return show(Frame("T", HEADS, rows, ("steps",), HEADS), width)


def test_what_fits_is_one_table_with_numbers_below_numbers():
    title, head, rule, *rows, last = whole(60)
    assert (title, last) == ("T", "")
    assert head.split() == " ".join(HEADS).split()
    assert set(rule) == {"─"}
    assert [row.split()[-4] for row in rows] == ["5", "49"]
    end = head.index("steps") + 5
    assert [row[:end].split()[-1] for row in rows] == ["5", "49"]


def test_a_heading_is_wrapped_and_a_cell_is_not():
    lines = whole(42)
    assert len(lines) == 7
    assert all(any(cell in line for line in lines) for row in ROWS for cell in row)


@pytest.mark.parametrize("width", [26, 30, 41])
def test_what_is_too_wide_is_in_parts_that_name_the_rows(width):
    lines = whole(width, ROWS * 3)
    assert all(any(cell in line for line in lines) for row in ROWS for cell in row)
    parts = sum(line.startswith("row") for line in lines)
    assert parts > 1
    assert sum(line.startswith("sgd, slow") for line in lines) == 3 * parts
    said = " ".join(line.strip() for line in lines[-2:])
    assert said.endswith(f"In {parts} parts; they are one with COLUMNS=42.")
    assert len(whole(42, ROWS * 3)) < len(lines)


def test_few_rows_of_many_columns_become_columns():
    heads = [f"column {place}" for place in range(9)]
    rows = [["a", *"12345678"], ["b", *"87654321"]]
    _, head, _, first, *_, said = show(Frame("T", heads, rows, (), heads), 60)
    assert (head.split(), first.split()) == (["a", "b"], ["column", "1", "1", "8"])
    assert said.startswith("Rows are columns here; they are not with COLUMNS=")


def test_sentences_are_wrapped_between_words_and_a_key_is_not():
    rows = [("optimizer.weight_decay", "of the parameters, before the momentum")]
    lines = show(Frame("", ("key", "what"), rows), 40)
    assert lines[2].startswith("optimizer.weight_decay  of the")
    assert " ".join(line[24:].strip() for line in lines[2:]).strip() == rows[0][1]


def test_a_word_that_is_wider_than_the_terminal_is_folded():
    lines = show(Frame("", ("a", "b"), [("x" * 30, "y")]), 12)
    assert sum(line.count("x") for line in lines) == 30
