"""From the paths of a YAML to files, and from files to records with the line each came from."""

from __future__ import annotations

import glob
import json
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hybrid5d.data.faults import Faults

STDLIB = "stdlib"
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "lib-dynload", "test", "tests", "idle_test"}
_RECORD_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
_ARROW_BATCH = 1024
Kind = Literal["text", "jsonl", "json", "parquet", "arrow"]


@dataclass(frozen=True)
class SourceFile:
    """One file to read.

    Attributes:
        path: where it is.
        kind: how it is read.
        named: the user wrote this very path (an empty file is then a fault; among a folder's files it is skipped).
        lenient: files that are not the user's (the standard library): what is not UTF-8 is skipped.
    """

    path: Path
    kind: Kind
    named: bool = True
    lenient: bool = False


def resolve_sources(paths: Sequence[str], data_type: str, faults: Faults) -> list[SourceFile]:
    """Files of `paths` in a fixed order: paths as given, files of a folder or glob sorted by name.

    A path is a file, a folder (searched recursively), a glob, a folder saved by HF `datasets`, `stdlib` (the .py
    sources of the running Python's standard library without its tests) or `stdlib/PATH` (file, folder, glob below).
    """
    result: list[SourceFile] = []
    for text in paths:
        if text == STDLIB or text.startswith(STDLIB + "/"):
            files = _stdlib_files(text[len(STDLIB) + 1 :], faults, text)
        else:
            files = _user_files(text, data_type, faults)
        result.extend(files)
    return result


def _stdlib_files(below: str, faults: Faults, shown: str) -> list[SourceFile]:
    root = Path(sysconfig.get_paths()["stdlib"])
    start = str(root / below) if below else str(root)
    matches = glob.glob(start, recursive=True) if glob.has_magic(below) else [start]
    paths: list[Path] = []
    for match in sorted(matches):
        if os.path.isdir(match):
            paths.extend(p for p in _walk(Path(match), faults, _STDLIB_SKIPPED if not below else {"__pycache__"}))
        elif os.path.isfile(match):
            paths.append(Path(match))
    files = [SourceFile(p, "text", named=False, lenient=True) for p in paths if p.suffix == ".py"]
    if not files:
        faults.add(shown, None, f"no .py file there in the standard library of this Python ({root})")
    return files


def _user_files(text: str, data_type: str, faults: Faults) -> list[SourceFile]:
    path = Path(os.path.expanduser(text))
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        if not glob.has_magic(text):
            faults.add(text, None, "no such file or folder")
            return []
        matches = sorted(m for m in glob.glob(str(path), recursive=True) if os.path.isfile(m))
        if not matches:
            faults.add(text, None, "no file matches")
        return [SourceFile(Path(m), _kind(Path(m), data_type), named=False) for m in matches]
    except OSError as e:  # a folder above it is closed
        faults.add(text, None, f"cannot be read: {e.strerror or e}")
        return []
    return _folder_files(path, data_type, faults) if is_folder else [SourceFile(path, _kind(path, data_type))]


def _folder_files(folder: Path, data_type: str, faults: Faults) -> list[SourceFile]:
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _saved_dataset_files(folder, faults)
    before = faults.count
    paths = list(_walk(folder, faults, set()))
    if data_type != "text":
        paths = [p for p in paths if p.suffix.lower() in _RECORD_SUFFIXES]
    if not paths and faults.count == before:
        wanted = "file" if data_type == "text" else " / ".join(_RECORD_SUFFIXES)
        faults.add(folder, None, f"the folder holds no {wanted}")
    return [SourceFile(p, _kind(p, data_type), named=False) for p in paths]


def _saved_dataset_files(folder: Path, faults: Faults) -> list[SourceFile]:
    """The arrow files of a folder written by `datasets.Dataset.save_to_disk`; of a DatasetDict, its `train` split."""
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
            if len(splits) != 1 and "train" not in splits:
                faults.add(folder, None, f"splits {splits}: none is called train. Fix: name one, {folder}/{splits[0]}")
                return []
            folder = folder / ("train" if "train" in splits else splits[0])
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [SourceFile(folder / f["filename"], "arrow", named=False) for f in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as e:
        faults.add(folder, None, f"not a readable folder of HF datasets: {e}")
        return []


def _walk(folder: Path, faults: Faults, skipped: set[str]) -> Iterator[Path]:
    """Regular files below `folder`, depth first, sorted by name; hidden ones left out."""
    try:
        entries = sorted(os.scandir(folder), key=lambda e: e.name)
    except OSError as e:
        faults.add(folder, None, f"cannot be listed: {e.strerror}")
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in skipped:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), faults, skipped)
        elif entry.is_file():
            yield Path(entry.path)


def _kind(path: Path, data_type: str) -> Kind:
    suffix = path.suffix.lower()
    if data_type == "text" and suffix in (".json", ".arrow"):
        return "text"  # a document like any other; only .jsonl and .parquet are collections of documents
    return _RECORD_SUFFIXES.get(suffix, "text" if data_type == "text" else "jsonl")  # type: ignore[return-value]


def read_records(source: SourceFile, faults: Faults) -> Iterator[tuple[int, Any]]:
    """(line, record) of a JSONL, JSON, Parquet or Arrow file; faults are added, the reading goes on where it can.

    `line` is the line of a JSONL file, else the 1-based number of the item.
    """
    try:
        if source.path.stat().st_size == 0:
            if source.named:
                faults.add(source.path, None, "the file is empty (0 bytes)")
            return
        if source.kind == "json":
            yield from _read_json(source.path, faults)
        elif source.kind in ("parquet", "arrow"):
            yield from _read_arrow(source, faults)
        else:
            yield from _read_jsonl(source.path, faults)
    except OSError as e:
        faults.add(source.path, None, f"cannot be read: {e.strerror or e}")


def _read_jsonl(path: Path, faults: Faults) -> Iterator[tuple[int, Any]]:
    with open(path, "rb") as f:
        for number, raw in enumerate(f, start=1):
            if number == 1 and raw.startswith(b"\xef\xbb\xbf"):
                raw = raw[3:]
            if not raw.strip():
                continue
            try:
                record = json.loads(raw.decode("utf-8"))
            except UnicodeDecodeError as e:
                faults.add(path, number, f"not UTF-8: byte 0x{raw[e.start]:02x} at position {e.start} of the line")
                continue
            except (ValueError, RecursionError) as e:
                faults.add(path, number, f"not JSON: {e}")
                continue
            if b"\\u" not in raw or _is_text(path, number, record, faults):
                yield number, record


def _is_text(path: Path, number: int, record: Any, faults: Faults) -> bool:
    """False, with a fault, for half of a surrogate pair: JSON may escape one, no tokenizer takes it."""
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as e:
        half = f"\\u{ord(e.object[e.start]):04x}"
        faults.add(path, number, f"no Unicode text: {half} is half of a character, without its other half")
        return False
    except RecursionError:
        faults.add(path, number, "not JSON: nested too deeply")
        return False
    return True


def _read_json(path: Path, faults: Faults) -> Iterator[tuple[int, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        body = json.loads(text)
    except UnicodeDecodeError as e:
        faults.add(path, None, f"not UTF-8: byte 0x{e.object[e.start]:02x} at position {e.start}")
        return
    except json.JSONDecodeError as e:
        faults.add(path, e.lineno, f"not JSON: {e.msg} (column {e.colno}); one object a line needs the suffix .jsonl")
        return
    except (ValueError, RecursionError) as e:  # the parser's limits
        faults.add(path, None, f"not JSON: {e}")
        return
    if isinstance(body, dict) and isinstance(body.get("data"), list):
        body = body["data"]
    if not isinstance(body, list):
        faults.add(path, None, 'neither a JSON list of samples nor an object with a list under "data"')
        return
    escapes = "\\u" in text
    del text
    for number, record in enumerate(body, start=1):
        if not escapes or _is_text(path, number, record, faults):
            yield number, record


def _read_arrow(source: SourceFile, faults: Faults) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        faults.add(source.path, None, f"{source.kind} files need pyarrow. Fix: pip install 'hybrid5d[data]'")
        return
    number = 0
    try:
        if source.kind == "parquet":
            with pq.ParquetFile(source.path) as file:
                for batch in file.iter_batches(batch_size=_ARROW_BATCH):
                    for record in batch.to_pylist():
                        number += 1
                        yield number, record
        else:
            with pa.memory_map(str(source.path)) as mapped, pa.ipc.open_stream(mapped) as reader:
                for batch in reader:
                    for record in batch.to_pylist():
                        number += 1
                        yield number, record
    except (pa.ArrowException, UnicodeDecodeError) as e:
        faults.add(source.path, None, f"not a readable {source.kind} file: {str(e).splitlines()[0]}")
