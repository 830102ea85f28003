"""Forms in which people have their files: compressed, in parts of which some are empty, under odd names."""

from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.data import derived
from elastic_rl.data.file_source import FileSource, jsonl, parquet
from elastic_rl.data.rows import JsonlRows, files_of, value_at
from elastic_rl.data.text_options import with_absolute_paths
from elastic_rl.data.tokenizer import CharacterTokenizer
from elastic_rl.errors import ConfigError, SourceFailed

LINES = b"".join(json.dumps({"q": f"{n}+{n}="}).encode() + b"\n" for n in range(100))
ROWS = [json.loads(line) for line in LINES.splitlines()]


def opened(kind: str, folder: Path, paths: str | Sequence[str], **options: Any) -> FileSource:
    given = {"paths": paths, "prompt_key": "q", "apply_chat_template": False, "overlap": "unchecked",
             "max_prompt_tokens": 50, "max_response_tokens": 9, **options}
    return {"jsonl": jsonl, "parquet": parquet}[kind](
        given, seed=0, eval_fraction=0.1, tokenizer=CharacterTokenizer(), folder=folder / "job")


def texts(source: FileSource) -> list[str]:
    return sorted(prompt.text for prompt in [*source.train, *source.eval])


def test_blank_lines_at_the_end_cross_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.data.rows._BLOCK", 16)
    (tmp_path / "a.jsonl").write_bytes(LINES + b"\r\n \n" * 40)
    rows = JsonlRows(tmp_path / "a.jsonl", tmp_path)
    assert list(rows.scan()) == [rows.row(n) for n in range(len(rows))] == ROWS


def test_gzip_is_unpacked_once_and_its_rows_have_the_places_of_the_file(tmp_path: Path) -> None:
    path, folder = tmp_path / "a.jsonl.gz", tmp_path / "job"
    path.write_bytes(gzip.compress(LINES, mtime=0))
    rows = JsonlRows(path, folder)
    assert list(rows.scan()) == [rows.row(n) for n in range(100)] == ROWS and rows.where(3) == f"{path}:4"
    [copy] = folder.iterdir()
    made_at = copy.stat().st_mtime_ns
    assert JsonlRows(path, folder).row(9) == ROWS[9] and copy.stat().st_mtime_ns == made_at
    copy.unlink()
    assert rows.row(7) == ROWS[7], "it is unpacked again where the copy is gone"
    derived._used.clear()  # as in a process with other data
    derived.remove_unused(folder)
    assert not copy.exists()
    path.write_bytes(gzip.compress(LINES[:20] + LINES, mtime=0))
    with pytest.raises(SourceFailed, match="a.jsonl.gz has changed since it was first read"):
        rows.row(7)


@pytest.mark.parametrize(("content", "said"), [
    (gzip.compress(LINES, mtime=0)[:-9], "compressed with gzip, and damaged: .*gzip -t"),
    (b"\x1f\x8b" + LINES, "compressed with gzip, and damaged"),
    (bz2.compress(LINES), "compressed with bzip2 .unpack it"),
    (b"\x28\xb5\x2f\xfd" + LINES, "compressed with zstd .unpack it"),
    (b"PAR1" + LINES, "is a Parquet file .set data.source to parquet"),
    (gzip.compress(b"\n\n", mtime=0), "a.gz is empty")])
def test_file_of_another_form_is_named_as_what_it_is(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "a.gz").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        opened("jsonl", tmp_path, str(tmp_path / "a.gz"))


def test_compressed_parquet_file_is_named_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(bz2.compress(b"PAR1"))
    with pytest.raises(ConfigError, match="a.parquet is compressed with bzip2"):
        opened("parquet", tmp_path, str(tmp_path / "a.parquet"))


def test_folders_that_are_there_are_no_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run [1]" / "*"
    for name in ("a.jsonl", "b.jsonl", "part [2].jsonl", "deep/c.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(LINES)
    monkeypatch.chdir(folder)

    def found(text: str) -> list[str]:
        given = with_absolute_paths("jsonl", {"paths": text})["paths"]
        assert files_of(given, "paths") == files_of(text, "paths")
        return [str(path.relative_to(folder)) for path in files_of(text, "paths")]

    assert found("*.jsonl") == ["a.jsonl", "b.jsonl", "part [2].jsonl"]
    assert found("**/*.jsonl") == ["a.jsonl", "b.jsonl", "deep/c.jsonl", "part [2].jsonl"]
    assert found("part [2].jsonl") == ["part [2].jsonl"] and found("[ab].jsonl") == ["a.jsonl", "b.jsonl"]
    assert [path.name for path in files_of(f"{tmp_path}/run */[*]/a.jsonl", "paths")] == ["a.jsonl"]
    with pytest.raises(ConfigError, match="there is no file c.*jsonl; did you mean [ab].jsonl"):
        files_of("c.jsonl", "paths")


@pytest.mark.parametrize("name", ["x" * 247, "é" * 123])
def test_name_may_be_as_long_as_the_file_system_allows(tmp_path: Path, name: str) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / f"{name}.parquet")
    (tmp_path / f"{name}.jsonl").write_bytes(gzip.compress(LINES, mtime=0))
    for kind in ("parquet", "jsonl"):
        assert texts(opened(kind, tmp_path, str(tmp_path / f"{name}.{kind}"))) == sorted(r["q"] for r in ROWS)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_empty_files_among_others_are_no_fault(tmp_path: Path, kind: str) -> None:
    files = [tmp_path / f"{n}.{kind}" for n in range(4)]
    for number, file in enumerate(files):
        rows = ROWS[:number % 2 * 50]
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), file)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert texts(opened(kind, tmp_path, str(tmp_path / f"*.{kind}"))) == sorted(r["q"] for r in ROWS[:50] * 2)
    assert texts(opened(kind, tmp_path, str(files[1]), duplicates="drop")) == sorted(r["q"] for r in ROWS[:50])
    with pytest.raises(ConfigError, match="all 2 files of data.options.paths are empty"):
        opened(kind, tmp_path, [str(files[0]), str(files[2])])


ODD = ["prompt", "Question [EN]", "prompt:text", "what?!", "0", "question (raw)", "a.b", "frage ä", "{q}", "q!r",
       "a.b.c", "."]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", ODD)
def test_any_text_may_be_the_name_of_a_column(tmp_path: Path, kind: str, name: str) -> None:
    rows = [{name: row["q"], "other": 1, "a": "a", "s.t": {"u": str(number)}} for number, row in enumerate(ROWS)]
    file = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = opened(kind, tmp_path, str(file), prompt_key=name, answer_key="s.t.u", metadata_keys=[name])
    assert texts(source) == sorted(row["q"] for row in ROWS)
    assert all(ROWS[int(p.metadata["answer"])] == {"q": p.metadata[name]} == {"q": p.text} for p in source.train)
    if not set(name) & set("{}"):
        template = opened(kind, tmp_path, str(file), prompt_key="", template="1" + "{" + name + "}2")
        assert texts(template) == sorted("1" + row["q"] + "2" for row in ROWS)


@given(st.recursive(st.none() | st.integers(), lambda inner: st.dictionaries(st.sampled_from(["a", "b", "a.b"]), inner),
                    max_leaves=6))
def test_key_names_the_longest_column_that_is_there(row: Any) -> None:
    def at(value: Any, parts: list[str]) -> Any:
        for end in range(len(parts), 0, -1):
            if isinstance(value, dict) and (name := ".".join(parts[:end])) in value:
                return at(value[name], parts[end:])
        return value if value is None or not parts else "none such"

    def found(key: str) -> Any:
        try:
            return value_at(row, key, "it")
        except SourceFailed:
            return "none such"

    if isinstance(row, dict):
        assert all(found(key) == at(row, key.split(".")) for key in ("a", "a.b", "a.b.a", "b.a", "a.b.b.a"))
