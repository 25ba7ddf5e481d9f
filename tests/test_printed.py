"""A matrix as text: `trace --matrix` reads what the page reads, and refuses what it refuses."""

import json
import math
import re

import numpy as np
import pytest
import torch
from commands import fused_softmax

from fused_softmax.trace import printed

ROWS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


@pytest.mark.parametrize(
    "text",
    [
        "1,2,3\n4,5,6",
        " 1, 2, 3 \r\n 4, 5, 6 \r\n",
        "1\t2\t3\n4\t5\t6",
        "1  2 3\n\n4 5   6",
        "1;2;3\n4;5;6",
        "1,2,3,\n4,5,6,",
        "# two rows\n1 2 3  # the first\n4 5 6",
        "[[1, 2, 3], [4, 5, 6]]",
        "[\n [1.0, 2e0, 3],\n [4, 5, 6]\n]",
        str(torch.tensor(ROWS)),
        "tensor([[1., 2., 3.],\n        [4., 5., 6.]], device='cuda:0', dtype=torch.float16)",
        str(np.array(ROWS)),
        repr(np.array(ROWS, np.float32)),
        "numpy.array([[1., 2., 3.], [4., 5., 6.]])",
    ],
)
def test_what_torch_numpy_and_others_write_is_read(text):
    assert printed.rows_of(text, "x") == ROWS


@pytest.mark.parametrize(
    "text", ["1 2 3", "[1, 2, 3]", "tensor([1., 2., 3.])", "[1. 2. 3.]", '["1", "2", "3"]', "[[1 2 3]]"]
)
def test_one_row_is_a_matrix(text):
    assert printed.rows_of(text, "x") == ROWS[:1]


@pytest.mark.parametrize(
    "text",
    [
        "inf -inf nan -.5 1e-3",
        "Infinity, -Infinity, NaN, \u22120.5, +0.001",
        "∞ -∞ nan -0.5 0.001",
        "[[Infinity, -inf, NaN, -0.5, 0.001]]",
        '[["inf", "-inf", "nan", -0.5, 0.001]]',
        str(torch.tensor([[math.inf, -math.inf, math.nan, -0.5, 1e-3]], dtype=torch.float64)),
    ],
)
def test_infinities_and_nan_are_read_as_others_spell_them(text):
    ((inf, minus_inf, nan, *rest),) = printed.rows_of(text, "x")
    assert (inf, minus_inf, rest) == (math.inf, -math.inf, [-0.5, 1e-3])
    assert math.isnan(nan)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,two,3", "x, line 1, number 2: 'two' is not a number"),
        ("1,,3", "x, line 1, number 2: the field is empty"),
        ("0x10", "'0x10' is not a number"),
        ("1_000", "'1_000' is not a number"),
        ("1e400", "x, line 1, number 1: 1e400 is too large for any float"),
        ("[[1, 1e400]]", "x, row 1, number 2: 1e400 is too large for any float"),
        ("tensor([[1., ..., 3.]])", "x, row 1, number 2: '...' is not a number"),
        ("[[1, 2], 3]", "x, row 2: not a list of numbers"),
        ("[[1, null]]", "x, row 1, number 2: 'null' is not a number"),
        ("[[1, [2]]]", 'x, row 1, number 2: ["2"] is not a number'),
        ("[1, 2", "x starts like JSON but is not valid JSON"),
        ("[" * 100_000, "x starts like JSON but is not valid JSON"),
        ("1 2 3 -", "'-' is not a number"),
    ],
    ids=lambda value: value[:30],
)
def test_what_is_no_matrix_is_named_with_its_place(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        printed.rows_of(text, "x")


def test_the_command_takes_a_printed_tensor_and_says_what_it_wrote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text(str(torch.tensor(ROWS)))
    result = fused_softmax("trace", "--kernel", "naive", "--matrix", "x.txt", "-o", "x.json")
    assert (result.exit_code, result.output) == (
        0, "wrote x.json: recordings, as trace/schema.json describes them\n"
    )  # fmt: skip
    assert json.loads((tmp_path / "x.json").read_text())["tensors"][0]["before"] == [*ROWS[0], *ROWS[1]]
    result = fused_softmax("trace", "-o", "x.html")
    assert (result.exit_code, result.output) == (0, "wrote x.html: open it in a browser\n")
    (tmp_path / "x.txt").write_text("[]")
    result = fused_softmax("trace", "--kernel", "naive", "--matrix", "x.txt", "-o", "y.json")
    assert result.exit_code == 2
    assert result.stderr == "Error: x.txt has no numbers\n"
