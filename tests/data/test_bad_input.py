"""Broken data: one line per fault with file and line, all at once, nothing half-written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hybrid5d.data.dataset import open_dataset
from hybrid5d.data.faults import SHOWN_FAULTS
from hybrid5d.errors import DataError
from tests.data.kit import data_options

GOOD_CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
GOOD = {"tokens": {"input_ids": [1, 2]}, "chat": GOOD_CHAT}


def open_file(tmp_path: Path, data_type: str, *paths: Path, **kwargs: object) -> object:
    options = data_options(
        kind=data_type,
        paths=tuple(map(str, paths)),
        seq_length=32,
        vocab_size=300,
        cache_dir=str(tmp_path / "cache"),
        **kwargs,  # type: ignore[arg-type]
    )
    return open_dataset(options)


def faults_of(tmp_path: Path, data_type: str, *paths: Path, **kwargs: object) -> list[str]:
    with pytest.raises(DataError) as e:
        open_file(tmp_path, data_type, *paths, **kwargs)
    cache = tmp_path / "cache"
    left = [p.name for p in cache.iterdir() if p.suffix != ".lock"] if cache.exists() else []
    assert left == []  # neither a store nor a part of one
    return str(e.value).split("\n")


TOKEN_FAULTS = [
    (b"{", "not JSON"),
    (b"[1, 2]", "a JSON object is expected, not list"),
    (b'{"ids": [1]}', "no key 'input_ids'; its keys: ids"),
    (b'{"input_ids": "12"}', "input_ids must be a list of integers, not str"),
    (b'{"input_ids": []}', "input_ids is empty"),
    (b'{"input_ids": [1, 2.5]}', "input_ids[1]=2.5 is not an integer"),
    (b'{"input_ids": [1, true]}', "input_ids[1]=True is not an integer"),
    (b'{"input_ids": [[1]]}', "input_ids[0]=[1] is not an integer"),
    (b'{"input_ids": [1, 300]}', "input_ids[1]=300 is outside the vocabulary (0..299)"),
    (b'{"input_ids": [-1]}', "input_ids[0]=-1 is outside the vocabulary (0..299)"),
    (b'{"input_ids": [99999999999999999999]}', "input_ids holds a number beyond 64 bits"),
    (b'{"input_ids": [1, 2], "labels": [1]}', "1 labels for 2 input_ids"),
    (b'{"input_ids": [1, 2], "labels": [1, 300]}', "labels[1]=300 is outside the vocabulary (0..299 or -100)"),
    (b'{"input_ids": [1, 2], "labels": [-1, 2]}', "labels[0]=-1 is outside the vocabulary (0..299 or -100)"),
    (b'{"input_ids": [1], "x": "\xff"}', "not UTF-8: byte 0xff at position 25 of the line"),
    (b"[" * 100_000, "not JSON: maximum recursion depth"),
    (b"9" * 5000, "not JSON: Exceeds the limit"),
]
CHAT_FAULTS = [
    (b'{"text": "hi"}', "no key 'messages' (nor 'prompt'/'response', nor 'instruction'/'output'); its keys: text"),
    (b'{"messages": []}', "'messages' is an empty conversation"),
    (b'{"messages": "hi"}', "'messages' must be a list of messages, not str"),
    (b'{"messages": ["hi"]}', "messages[0] must be an object with role and content, not str"),
    (b'{"messages": [{"content": "hi"}]}', "messages[0] has no role"),
    (b'{"messages": [{"role": "user"}]}', "messages[0].content must be a string, not NoneType"),
    (b'{"messages": [{"role": "user", "content": "hi"}]}', "has no assistant turn"),
    (
        b'{"prompt": "hi"}',
        "'prompt' without 'response'; its keys: prompt. Fix: name the answer's field in data.response_key",
    ),
    (b'{"instruction": 3, "output": "x"}', "'instruction' must be a string, not int"),
    (rb'{"prompt": "a\ud83d\ude00", "response": "b\uDE00"}', r"no Unicode text: \ude00 is half of a character"),
    (rb'{"messages": [{"role": "\ud800", "content": ""}]}', r"no Unicode text: \ud800 is half of a character"),
]


@pytest.mark.parametrize(
    "data_type,line,text",
    [("tokens", *f) for f in TOKEN_FAULTS] + [("chat", *f) for f in CHAT_FAULTS],
)
def test_bad_line_is_named(tmp_path: Path, data_type: str, line: bytes, text: str) -> None:
    path = tmp_path / "x.jsonl"
    good = json.dumps(GOOD[data_type]).encode()
    path.write_bytes(good + b"\n\n" + line + b"\n" + good + b"\n")
    (found,) = faults_of(tmp_path, data_type, path)
    assert found.startswith(f"{path}:3: ") and text in found


def test_all_faults_of_all_files_come_together(tmp_path: Path) -> None:
    a, b, empty = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "empty.jsonl"
    a.write_text('{"input_ids": [1]}\n{\n{"input_ids": [300]}\n')
    b.write_text('{"input_ids": []}\n')
    empty.write_bytes(b"")
    found = faults_of(tmp_path, "tokens", a, b, empty)
    assert [f.split(" ")[0] for f in found] == [f"{a}:2:", f"{a}:3:", f"{b}:1:", f"{empty}:"]
    assert found[3] == f"{empty}: the file is empty (0 bytes)"


def test_faults_are_capped_and_the_rest_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("{\n" * (SHOWN_FAULTS + 7))
    found = faults_of(tmp_path, "tokens", path)
    assert len(found) == SHOWN_FAULTS + 1 and found[-1] == "... and 7 more faults of this kind in the data"


def test_missing_files_come_together(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    found = faults_of(tmp_path, "tokens", tmp_path / "no.jsonl", tmp_path / "*.jsonl", tmp_path / "folder")
    assert found == [
        f"{tmp_path}/no.jsonl: no such file or folder",
        f"{tmp_path}/*.jsonl: no file matches",
        f"{tmp_path}/folder: the folder holds no .jsonl / .ndjson / .json / .parquet / .arrow",
    ]


def test_unreadable_folder_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's answer is imitated: the tests may run as root, to whom nothing is closed."""
    folder, file = tmp_path / "closed", tmp_path / "x.jsonl"
    folder.mkdir()
    file.write_text("{}\n")
    real_scandir, real_open = os.scandir, open

    def scandir(path: object) -> object:
        if str(path) == str(folder):
            raise PermissionError(13, "Permission denied", str(path))
        return real_scandir(path)  # type: ignore[call-overload]

    def open_(path: object, *args: object, **kwargs: object) -> object:
        if str(path) == str(file):
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr("builtins.open", open_)
    assert faults_of(tmp_path, "tokens", folder, file) == [
        f"{folder}: cannot be listed: Permission denied",
        f"{file}: cannot be read: Permission denied",
    ]


def test_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    path, blocked = tmp_path / "x.jsonl", tmp_path / "file"
    path.write_text(json.dumps(GOOD["tokens"]))
    blocked.write_text("")
    with pytest.raises(DataError, match=r"the token cache cannot be written.*data\.cache_dir"):
        open_dataset(data_options("tokens", (str(path),), 32, 300, cache_dir=str(blocked / "cache")))


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path, empty = tmp_path / "x.txt", tmp_path / "empty.txt"
    path.write_bytes("grüße\n".encode() + b"a\n" + "grüße\n".encode("latin-1"))
    empty.write_bytes(b"")
    found = faults_of(tmp_path, "text", path, empty)
    assert found == [
        f"{path}:3: not UTF-8: byte 0xfc at position 2 of the line",
        f"{empty}: the file is empty (0 bytes)",
    ]


def test_text_records_without_text(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "abc"}\n{"body": "abc"}\n')
    assert faults_of(tmp_path, "text", path) == [f"{path}:2: no string under 'text' (data.text_key)"]


def test_json_file_faults(tmp_path: Path) -> None:
    lines, mapping = tmp_path / "lines.json", tmp_path / "map.json"
    lines.write_text('{"input_ids": [1]}\n{"input_ids": [2]}\n')
    mapping.write_text('{"rows": []}')
    found = faults_of(tmp_path, "tokens", lines, mapping)
    assert found[0].startswith(f"{lines}:2: not JSON: Extra data") and ".jsonl" in found[0]
    assert found[1].startswith(f"{mapping}: neither a JSON list")


def test_json_at_the_edge_of_the_parsers_depth(tmp_path: Path) -> None:
    """What is read but cannot be written again is a fault of its line, too."""
    path = tmp_path / "x.jsonl"
    path.write_text("".join("[" * n + '"\\u0041"' + "]" * n + "\n" for n in range(700, 1000)))
    found = faults_of(tmp_path, "tokens", path)
    assert found[0].startswith(f"{path}:1: a JSON object is expected")


@pytest.mark.parametrize("body", ["[" * 100_000, f"[{'9' * 5000}]"])
def test_json_file_beyond_the_parsers_limits(tmp_path: Path, body: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(body)
    (found,) = faults_of(tmp_path, "tokens", path)
    assert found.startswith(f"{path}: not JSON: ")


def test_half_characters_of_a_json_file_are_named_by_item(tmp_path: Path) -> None:
    emoji = tmp_path / "emoji.jsonl"
    emoji.write_text(json.dumps({"text": "\N{GRINNING FACE}"}))  # two escapes that are one character
    chat = json.dumps([GOOD_CHAT, {"prompt": "\ud83d", "response": "b"}])
    (tmp_path / "chat.json").write_text(chat)
    (found,) = faults_of(tmp_path, "chat", tmp_path / "chat.json")
    assert found.startswith(f"{tmp_path}/chat.json:2: no Unicode text: ")
    assert open_file(tmp_path, "text", emoji).report.tokens == 6  # type: ignore[attr-defined]


def test_chat_template_that_is_not_there(tmp_path: Path) -> None:
    path, missing = tmp_path / "x.jsonl", tmp_path / "no.jinja"
    path.write_text(json.dumps(GOOD_CHAT))
    (found,) = faults_of(tmp_path, "chat", path, chat_template=str(missing))
    assert found == f"{missing}: data.chat_template cannot be read: No such file or directory"


def test_broken_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1 not really PAR1")
    (found,) = faults_of(tmp_path, "tokens", path)
    assert found.startswith(f"{path}: not a readable parquet file: ")


def test_training_on_nothing(tmp_path: Path) -> None:
    assert faults_of(tmp_path, "tokens") == ["data.train_data_paths: no file to train on"]
    blank = tmp_path / "blank.jsonl"
    blank.write_text("\n\n")
    with pytest.raises(DataError, match="no row to train on"):
        open_file(tmp_path, "tokens", blank)


def test_training_on_rows_without_any_target(tmp_path: Path) -> None:
    """With every answer cut off, each loss would be 0 and only weight decay would move the weights."""
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"prompt": "a" * 100, "response": "b"}) + "\n")
    with pytest.raises(DataError, match=r"none of the 1 rows .*\(1 truncated to seq_length=32\)\. Fix: "):
        open_file(tmp_path, "chat", path)
    assert open_file(tmp_path, "chat", path, allow_empty=True).report.without_target == 1  # type: ignore[attr-defined]


def test_vocabulary_larger_than_the_models(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("abc")
    with pytest.raises(DataError, match="ids up to 258, the model's vocab_size is 256"):
        open_dataset(data_options("text", (str(path),), 32, 256, cache_dir=str(tmp_path / "cache")))


def test_tokenizer_folder_faults(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("abc")
    missing, empty = tmp_path / "no", tmp_path / "empty"
    empty.mkdir()
    for folder, text in ((missing, "no such folder"), (empty, "holds no tokenizer.json")):
        (found,) = faults_of(tmp_path, "text", path, tokenizer=str(folder))
        assert found.startswith(f"{folder}: ") and text in found
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{")
    pytest.importorskip("transformers")
    (found,) = faults_of(tmp_path, "text", path, tokenizer=str(broken))
    assert found.startswith(f"{broken}: the tokenizer cannot be loaded: ")
