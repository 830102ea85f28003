"""Which answer of a response counts, and what is equal to it: the table of decided cases. A wrong answer that gets 1 is
worse than a right one that gets 0."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.rewards.final_answer import answer_of
from elastic_rl.rewards.math_text import plain_answer, plain_number_signs

grade = pytest.importorskip("elastic_rl.rewards.math_grading").grade

RIGHT = [
    ("two boxes: the last one", "4", ["First I got \\boxed{3}. I erred; it is \\boxed{4}."]),
    ("forms of a box", "7", ["so \\fbox{7}", "\\boxed 7", "\\\\boxed{7}", "$$x = \\boxed{7}$$", "\\boxed{\\boxed{7}}",
                             "\\boxed{7} since 2 < 9.", "\\framebox{7}"]),
    ("a box without an end", "42", ["The result is \\boxed{42", "$\\boxed{42$.", "\\boxed{41} no: \\boxed{42\n40"]),
    ("a fraction in one", "\\frac12", ["so $\\boxed{\\frac{1}{2}$."]),
    ("answer tags", "42", ["<think>41?</think><answer>42</answer>", "<answer>The answer is 42.</answer>",
                           "<answer>41</answer> no <answer>\\boxed{42}</answer> and 40"]),
    ("the line of GSM8K", "1,234", ["40 + 2\n#### 1,234", "#### 1234\nNote that 7 < 9."]),
    ("a gold solution of GSM8K", "6 * 7 = 42\n#### 42", ["\\boxed{42}"]),
    ("only what is behind the thinking", "42", ["<think>\\boxed{41}</think> The answer is 42."]),
    ("a letter", "C", ["The answer is C.", "The answer is (C)", "Final Answer: **C**", "C", "(C)", "\\boxed{C}",
                       "\\boxed{\\text{C}}", "\\boxed{\\textbf{(C)}}", "\\boxed{C. 42}", "\\boxed{(C) 42}",
                       "answer: A. No, the answer is C"]),
    ("a gold letter as text", "\\textbf{(C)}", ["\\boxed{C}", "The answer is C."]),
    ("percent", "50", ["\\boxed{50\\%}", "\\boxed{50 percent}", "The answer is 50%"]),
    ("gold percent", "50\\%", ["\\boxed{50}", "\\boxed{0.5}", "\\boxed{\\frac12}", "50%"]),
    ("a fraction as percent", "0.5", ["\\boxed{50\\%}"]),
    ("thousands", "1234567", ["\\boxed{1\\,234\\,567}", "\\boxed{1 234 567}", "\\boxed{1{,}234{,}567}",
                              "\\boxed{1,234,567}", "\\boxed{1~234~567}", "\\boxed{1\u202f234\u202f567}"]),
    ("scientific", "3.0e8", ["\\boxed{3 \\times 10^8}", "\\boxed{300000000}", "\\boxed{3E8}", "The answer is 3e8"]),
    ("small scientific", "1e-7", ["\\boxed{1 \\times 10^{-7}}", "\\boxed{10⁻⁷}", "\\boxed{0.0000001}"]),
    ("fractions of Unicode", "3/2", ["\\boxed{1½}", "\\boxed{1 1/2}", "\\boxed{1\\frac12}", "\\boxed{1.5}"]),
    ("half", "1/2", ["\\boxed{½}", "it is ½"]),
    ("digits of Unicode", "12", ["\\boxed{１２}", "\\boxed{١٢}"]),
    ("powers of Unicode", "x^2", ["\\boxed{x²}"]),
    ("symbols of Unicode", "2\\pi", ["\\boxed{2π}"]), ("roots of Unicode", "\\sqrt{2}", ["\\boxed{√2}"]),
    ("the empty set", "\\emptyset", ["\\boxed{\\varnothing}", "\\boxed{∅}", "\\boxed{\\{\\}}"]),
    ("six digits of what has no end", "\\frac13", ["\\boxed{0.333333}", "\\boxed{33.3333\\%}"]),
    ("six digits of pi", "\\pi", ["\\boxed{3.141593}"]),
    ("fp32 of the data", "0.6000000238418579", ["\\boxed{0.6}"]), ("fp64", "0.30000000000000004", ["\\boxed{0.3}"]),
    ("decimals in a pair", "(0.5,1)", ["\\boxed{(\\frac12,1)}"]),
    ("an equation without solutions", "x^2+1=0", ["\\boxed{2x^2+2=0}"]),
    ("arguments by blanks", "\\frac 1 2", ["\\boxed{0.5}"]), ("degrees", "120^\\circ", ["\\boxed{120°}"]),
    ("rows of a matrix", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", ["\\boxed{\\begin{pmatrix}1\\\\ 2\\end{pmatrix}}"]),
    ("words", "\\text{Tuesday}", ["\\boxed{\\text{Tuesday}}"])]
WRONG = [
    ("an earlier box", "3", ["First I got \\boxed{3}. I erred; it is \\boxed{4}.", "\\boxed{3}, so \\boxed{4"]),
    ("all that was tried", "7", ["\\boxed{1, 2, 7, 9}", "\\boxed{7} or \\boxed{9}"]),
    ("two boxes are no set", "\\{1,2\\}", ["$x=\\boxed{1}$ or $x=\\boxed{2}$"]),
    ("a box in tags", "42", ["<answer>\\boxed{41}</answer> 42"]), ("another line", "42", ["42\n#### 41"]),
    ("tiny numbers", "\\frac{1}{2004!}", ["\\boxed{\\frac{1}{2006!}}"]), ("10^-8", "10^{-8}", ["\\boxed{10^{-9}}"]),
    ("tiny powers", "\\frac{1}{2^{99}}", ["\\boxed{\\frac{1}{2^{98}}}"]), ("e^-50", "e^{-50}", ["\\boxed{e^{-51}}"]),
    ("tiny decimals", "0.0000001", ["\\boxed{0.0000002}", "\\boxed{2e-7}"]),
    ("tiny numbers in a set", "\\{10^{-20}\\}", ["\\boxed{\\{10^{-21}\\}}"]),
    ("tiny numbers in an interval", "(1e-9,1)", ["\\boxed{(1e-8,1)}"]),
    ("tiny numbers in an equation", "x=10^{-20}", ["\\boxed{x=10^{-21}}"]),
    ("tiny numbers in a matrix", "\\begin{pmatrix}10^{-20}\\\\2\\end{pmatrix}",
     ["\\boxed{\\begin{pmatrix}10^{-21}\\\\2\\end{pmatrix}}"]),
    ("large numbers", "2^{100}", ["\\boxed{2^{100}+1}"]), ("decimals are exact", "0.1", ["\\boxed{0.10000001}"]),
    ("fp32 of the data", "0.6000000238418579", ["\\boxed{0.6000001}"]),
    ("four digits of what has no end", "\\frac13", ["\\boxed{0.3333}"]), ("of pi", "\\pi", ["\\boxed{3.14159}"]),
    ("another letter", "C", ["The answer is B.", "\\boxed{B. 42}", "I think C. The answer is A."]),
    ("percent", "50\\%", ["\\boxed{5}", "\\boxed{0.05}"]), ("percent of the gold", "50", ["\\boxed{0.5}"]),
    ("thousands are no product", "0", ["\\boxed{10\\,000}", "\\boxed{10 000}"]),
    ("a power is no digit", "22", ["\\boxed{2²}"]), ("an exponent is read", "3", ["The answer is 3e8", "\\boxed{3e8}"]),
    ("one and a half is no 11/2", "11/2", ["\\boxed{1½}"]), ("zero is not empty", "\\emptyset", ["\\boxed{0}"]),
    ("named sets", "D = (0, 1)", ["\\boxed{D = (0, 1.5)}"]), ("named intervals", "D=[0,1]", ["\\boxed{D=[0,2]}"]),
    ("equations without solutions", "x^2+1=0", ["\\boxed{x^2+2=0}"])]
UNREAD = ["", "I do not know.", "\\boxed{}", "Let 42 be the unknown. I cannot solve it. \\boxed{}", "\\boxed{ }",
          "\\boxed{?}", "<answer></answer> 42", "<think>\\boxed{42}</think>I do not know.", "\\boxed{4 2}",
          "The answer is A triangle"]


@pytest.mark.parametrize(("right", "texts"), [pytest.param(r, t, id=name) for name, r, t in RIGHT])
def test_right_answer_is_worth_1(right: str, texts: list[str]) -> None:
    assert {text: grade({"text": text, "right": [right]}) for text in texts} == dict.fromkeys(texts, True)


@pytest.mark.parametrize(("right", "texts"), [pytest.param(r, t, id=name) for name, r, t in WRONG])
def test_wrong_answer_is_worth_0(right: str, texts: list[str]) -> None:
    assert {text: grade({"text": text, "right": [right]}) for text in texts} == dict.fromkeys(texts, False)


@pytest.mark.parametrize("text", UNREAD)
def test_response_in_which_nothing_can_be_read_is_neither_right_nor_wrong(text: str) -> None:
    assert grade({"text": text, "right": ["42"]}) is None


@given(st.text("\\boxed{} fbox<answer>/#\n4$.)]", max_size=60))
def test_answer_is_a_part_of_the_response(text: str) -> None:
    assert answer_of(text).text in text


@given(st.integers(1, 10**15), st.sampled_from([" ", "\\,", "\\ ", "~", "{,}", ",\\!", "\u00a0", "\u2009", "\u202f"]))
def test_any_separator_of_thousands_is_left_out(number: int, separator: str) -> None:
    assert plain_answer(f"{number:,}".replace(",", separator)) == str(number)


@given(st.text("0123456789+-*/^=()x, .", max_size=40).filter(lambda text: "  " not in text))
def test_number_signs_of_plain_text_stay_as_they_are(text: str) -> None:
    assert plain_number_signs(text, latex=False) == text
