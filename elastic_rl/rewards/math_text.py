"""Mathematical text in the one form that graders read, whatever form it was written in. Pure.

What is not read in the meaning that it was written in may be read in another one: ``10\\,000`` as a product, 3e8 as 3.
"""

from __future__ import annotations

import re
import unicodedata

_CURRENCY = re.compile(r"(\\\\)|\\text\{\\\$\}|\\\$|\\(?:pounds|textdollar)(?![a-zA-Z])|[£€¥]")
"""Signs of money: an amount is compared by its number. The escaped dollar of LaTeX does not enclose mathematics. The
group is a line break of LaTeX, which is kept: it escapes no dollar behind it."""
_SPACE = r"(?:(?<!\\)\\[,;:!> ]|[~\u00a0\u2009\u202f])"
"""A space within mathematics."""
_THOUSANDS = re.compile(rf"(?<![\w.,])(\d{{1,3}})((?:(?:{_SPACE}|\{{,\}}|,\\!)\d{{3}})+)(?![\d])")
_THOUSANDS_BY_BLANKS = re.compile(r"(?<![\w.,])(\d{1,3})((?: \d{3})+)(?![\d])")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?|\.\d+)[eE]([+-]?\d{1,9})(?![\w.]*\w)")
_MIXED = re.compile(rf"(?<![\d.^_/}}])(\d+)(?:\s|{_SPACE})+(\d+)/(\d+)(?![\d.])")
_ARGUMENTS = re.compile(r"\\([dt]?(?:frac|binom))\s*(\d)\s+(\d)")
_NUMBERS = re.compile(rf"\d(?:\s|{_SPACE})+\d")
_TIMES = re.compile(r"(?<=\d)\s*[×·]\s*(?=\d)")
_FRACTION = re.compile(r"(?:(\d+) +)?(\d+)\u2044(\d+)")
"""A fraction, and the whole number before it if there is one, from which ``plain_number_signs`` has parted it."""
_PERCENT = re.compile(r"(?:\s|\\[,;:! ]){0,4}(?:\\?%|\\text\{\s*(?:\\?%|percent)\s*\}|percent)[\s.]*\Z", re.IGNORECASE)
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
_SUPERSCRIPT = re.compile(f"[{_SUPERSCRIPTS}]+")
_SYMBOLS = {"×": "\\times ", "·": "\\cdot ", "÷": "\\div ", "π": "\\pi ", "∞": "\\infty ", "∅": "\\emptyset ",
            "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "±": "\\pm ", "∪": "\\cup ", "∩": "\\cap ", "°": "^\\circ "}
_ROOT = re.compile(r"√\s*(\d+(?:\.\d+)?|[a-zA-Z])")
_EMPTY_SET = re.compile(r"\\varnothing(?![a-zA-Z])|\A\\\{\s*\\\}\Z")
_LETTER = re.compile(r"(?:\\(?:text(?:bf|rm)?|math(?:bf|rm))\s*\{)?[\s*$]*\(?\s*([A-Z])\s*\)?[.:]?[\s*$]*\}?[\s*$.]*"
                     r"|(?:\\text(?:bf|rm)?\{)?[\s*$]*(?:\(([A-Z])\)|([A-Z])[).:])\}?[*$]*\s.*", re.DOTALL)
"""A letter alone, or in front of the words of its choice."""
_LETTER_WITHIN = 200
"""Characters of an answer that show whether it is a letter."""
_LETTER_OF_TEXT = re.compile(
    r"(?i:\banswer)(?i:\s+is)?[\s:*$]*(?:\\text\{|\\mathrm\{)?\(?([A-Z])(?:[).}*$]|[,;:]|\s*(?:\n|\Z)|\s+(?:because|since)\b)")


def plain_number_signs(text: str, *, latex: bool) -> str:
    """The text with its numbers in ASCII: without signs of money and separators of thousands; fractions, exponents and
    powers of ten of Unicode and of programs as ``latex``, or as they are typed."""
    text = _CURRENCY.sub(r"\1", text)
    text = "".join(map(_ascii, text)) if not text.isascii() else text
    power = (lambda digits: f"^{{{digits}}}") if latex else (lambda digits: f"^({digits})")
    text = _SUPERSCRIPT.sub(lambda found: power(unicodedata.normalize("NFKC", found[0]).replace("\u2212", "-")), text)
    text = _THOUSANDS.sub(lambda found: found[1] + re.sub(r"[^\d]", "", found[2]), text)
    times = " \\times " if latex else "*"
    text = _SCIENTIFIC.sub(lambda found: f"{found[1]}{times}10{power(found[2].lstrip('+'))}", text)
    text = _FRACTION.sub(lambda found: f"{found[1] or ''}\\frac{{{found[2]}}}{{{found[3]}}}" if latex else (
        f"({found[1] or 0}+{found[2]}/{found[3]})"), text)
    return text if latex else _TIMES.sub("*", text)


def plain_answer(text: str) -> str:
    """An answer that is nothing but mathematics, or words, as LaTeX."""
    text = plain_number_signs(text, latex=True)
    text = _ROOT.sub(r"\\sqrt{\1}", "".join(_SYMBOLS.get(c, c) for c in text))
    text = _ARGUMENTS.sub(r"\\\1{\2}{\3}", text)
    text = _THOUSANDS_BY_BLANKS.sub(lambda found: found[1] + found[2].replace(" ", ""), text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    return _EMPTY_SET.sub(r"\\emptyset ", text.strip())


def has_loose_numbers(text: str) -> bool:
    """Whether two numbers follow each other with nothing between them but space: nobody can know what is meant."""
    return _NUMBERS.search(text) is not None


def without_percent(text: str) -> tuple[str, bool]:
    """The text without the sign of percent at its end, and whether there was one."""
    bare = _PERCENT.sub("", text)
    return (bare, True) if bare != text and bare.strip() else (text, False)


def letter_of(text: str) -> str:
    """The letter that an answer is, or begins with, as one of several choices: ``C``, ``(C)``, ``\\text{C}``,
    ``C. 42``. "" for any other answer."""
    found = _LETTER.fullmatch(text.strip()[:_LETTER_WITHIN])
    return (found[1] or found[2] or found[3]) if found else ""


def letter_of_text(text: str) -> str:
    """The letter that the last ``the answer is C`` of a text names; "" where there is none."""
    found = _LETTER_OF_TEXT.findall(text)
    return found[-1] if found else letter_of(text) if len(text) < 8 else ""


def spelled(text: str) -> str:
    """The text for comparing how it is spelled: without spaces and dollars around it, and each run of white space as
    one."""
    return " ".join(text.strip(" \t\n\r$.").split())


def _ascii(c: str) -> str:
    if c == "\u2212":
        return "-"
    if "\uff01" <= c <= "\uff5e":
        return chr(ord(c) - 0xFEE0)
    if c.isdecimal():
        return str(unicodedata.decimal(c))
    fraction = unicodedata.normalize("NFKC", c) if unicodedata.category(c) == "No" else ""
    return f" {fraction}" if "\u2044" in fraction else c
