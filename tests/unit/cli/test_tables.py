"""Listings on a narrow terminal, in a pipe, and as JSON."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from elastic_rl.cli import listings, tables
from elastic_rl.cli.tables import Format

ROWS = [{"id": "rollout-283cdd", "state": "ready", "version": 169, "pid": 19461, "nbytes": 1572864, "updated_at": 0.0,
         "reason": "", "url": "http://127.0.0.1:35469/a/long/path"},
        {"id": "rollout-bdc6f4", "state": "dead", "version": 2, "pid": 19500, "nbytes": 3, "updated_at": 1.8e9,
         "reason": "a process of the SGLang server ended and that takes a good many words to tell, more than a line"}]
COLUMNS = ("id", "state", "version", "nbytes", "updated_at", "reason")


def shown(output: Format, *, terminal: bool, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)
    tables.show(console, ROWS, COLUMNS, output, wide=("pid", "url"))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_ids_on_a_terminal_are_whole_and_only_the_last_column_wraps() -> None:
    lines = shown(Format.TABLE, terminal=True)
    assert all(len(line) <= 80 for line in lines)
    assert lines[1].startswith("rollout-283cdd  ready") and "1.5 MiB" in lines[1]
    assert len(lines) > 3 and all(line.startswith(" ") for line in lines[3:])


def _printed(what: Any, width: int) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    tables.put(console, what, Format.TABLE)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("width", range(12, 60))
def test_number_is_never_parted_from_its_unit(width: int) -> None:
    text = "1.25 GiB of 1007.4 GiB, 345 tokens/s trained, MFU 34.1 %, in 12.5 s"
    values = ("1.25 GiB", "1007.4 GiB", "345 tokens/s", "34.1 %", "12.5 s")
    for what in (tables.facts({"throughput": text}), tables.table([{"a": "x" * 20, "memory": text}], ("a", "memory"),
                                                                 Format.TABLE)):
        room = width if isinstance(what, tables.Listing) else width + len("throughput  ")
        assert all(any(value in line for line in _printed(what, room)) for value in values)


def test_narrow_terminal_cuts_no_value_and_no_column_off() -> None:
    row = {"host": "gpu-node-0123", "phase": "ready", "address": "10.11.12.13", "cpus": "96 of 128", "gpus": 8,
           "services": "etcd, coordinator, dcs", "reason": "a long reason that goes on and on"}
    for width in range(20, 140, 7):
        lines = _printed(tables.table([row], tuple(row), Format.TABLE), width)
        assert not any("…" in line for line in lines)
        for word in " ".join(map(str, row.values())).split():
            assert any(word in line for line in lines[1:]), (width, word)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 200))
def test_widths_fit_where_they_can_and_take_nothing_from_short_values(natural: list[int], room: int) -> None:
    widths = tables.column_widths(natural, room)
    assert all(min(n, 16) <= w <= n for n, w in zip(natural, widths, strict=True))
    if sum(natural) <= room:
        assert widths == natural
    elif sum(widths) > room:
        assert widths == [min(n, 16) for n in natural], "as narrow as it may be"


def test_in_a_pipe_each_row_is_one_whole_line() -> None:
    lines = shown(Format.TABLE, terminal=False)
    assert len(lines) == 3 and lines[2].endswith("more than a line")


def test_wide_has_more_columns_and_cuts_nothing() -> None:
    lines = shown(Format.WIDE, terminal=True)
    assert len(lines) == 3 and "http://127.0.0.1:35469/a/long/path" in lines[1] and "19500" in lines[2]


def test_empty_column_is_omitted() -> None:
    console = Console(file=io.StringIO(), width=80)
    tables.show(console, [{"id": "a", "reason": ""}], ("id", "reason"), Format.TABLE)
    assert "reason" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_json_has_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show(Console(), ROWS, ("id",), Format.JSON)
    assert json.loads(capsys.readouterr().out) == ROWS


@pytest.mark.parametrize("nbytes, text", [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 30, "3.0 GiB"),
                                          (5 << 50, "5120.0 TiB")])
def test_sizes_are_told_in_binary_units(nbytes: int, text: str) -> None:
    assert tables.size(nbytes) == text


@pytest.mark.parametrize("seconds, text", [(0.9, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"),
                                           (172799, "47h"), (400 * 86400.0, "400d")])
def test_duration_is_told_in_one_unit_and_not_longer_than_it_is(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text


def test_cell_has_no_control_characters() -> None:
    for value in ("a\x1b[2Jb\u202e", ["a\x1b[2Jb\u202e"], {"a\x1b": "\u202e"}):
        text = tables.cell(value, "reason")
        assert not set(text) & set("\x1b\u202e"), text
    assert tables.cell("two\nlines", "reason") == "two lines"
    assert tables.printable("two\nlines") == "two\nlines"


_ODD = st.recursive(st.none() | st.booleans() | st.integers(-10**400, 10**400) | st.floats() | st.text(max_size=3)
                    | st.sampled_from([1e308, -1e308, 10**400, 1e10]),
                    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
                    max_leaves=6)


@given(_ODD, st.sampled_from(["since_at", "nbytes", "step", "message"]))
def test_cell_shows_whatever_a_record_has(value: Any, column: str) -> None:
    assert isinstance(tables.cell(value, column), str)


@given(_ODD, _ODD, _ODD)
def test_status_shows_whatever_the_records_have(odd: Any, other: Any, third: Any) -> None:
    member = {"role": "driver", "info": {"faults": odd, "waiting": other}, "work": {"flops": odd, "s_per_flop": other}}
    rows = [*listings.waiting_rows([member, {"role": "driver", "info": third}, {}]),
            *listings.operation_rows([{"total": odd, "done": other, "error": third}, {}]),
            *listings.alert_rows([{"since": odd}, {}]), {"expected_s": listings._expected_s(odd)}]
    run = {"eval_sets": {"a": odd}, "waiting_for": "x", "waiting_since": other, "steps": third, "step": odd}
    tables.table(rows, ("part", "since_at", "done", "message"), tables.Format.WIDE)
    tables.facts(listings.job_facts({"name": "j", "health": "ok", "status": run}))
