"""Text documents cut into rows, file formats, and the token cache."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hybrid5d.data.dataset as dataset_module
import hybrid5d.data.sources as sources_module
import hybrid5d.data.tokenise as tokenise_module
from hybrid5d.data.cache import open_or_build
from hybrid5d.data.dataset import Dataset, open_dataset
from hybrid5d.data.options import DataOptions
from hybrid5d.data.store import StoreWriter, open_store
from hybrid5d.data.types import IGNORE_INDEX
from hybrid5d.errors import DataError
from tests.data.kit import data_options

BOS, EOS = 256, 257


def text_options(tmp_path: Path, *paths: object, seq_length: int = 8, **kwargs: object) -> DataOptions:
    return data_options(
        "text",
        tuple(map(str, paths)),
        seq_length,
        259,
        cache_dir=str(tmp_path / "cache"),
        **kwargs,  # type: ignore[arg-type]
    )


def rows(dataset: Dataset) -> list[list[int]]:
    return [dataset.document(i).input_ids.tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("size", [0, 1, 5, 6, 7, 12, 13, 14, 30])
def test_each_token_is_a_target_once(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(65, 65 + size)) or b"\n")
    (tmp_path / "b.txt").write_text("xyz")
    dataset = open_dataset(text_options(tmp_path, tmp_path / "a.txt", tmp_path / "b.txt"))
    body = list(range(65, 65 + size)) or [10]
    documents = [[BOS, *body, EOS], [BOS, *b"xyz", EOS]]
    targets = []
    for i in range(len(dataset)):
        d = dataset.document(i)
        assert 2 <= len(d) <= 8 and d.row_id == i
        assert d.labels[:-1].tolist() == d.input_ids[1:].tolist() and d.labels[-1] == IGNORE_INDEX
        targets += d.labels[:-1].tolist()
    assert targets == [t for document in documents for t in document[1:]]


def test_long_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise_module, "_PIECE", 16)
    monkeypatch.setattr(tokenise_module, "_BATCH_CHARACTERS", 40)
    text = "".join(f"line {i} äöü\r\n" * (i % 3) + "x" * (i % 90) for i in range(100))
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "short"}))
    dataset = open_dataset(text_options(tmp_path, tmp_path / "a.txt", tmp_path / "b.jsonl", seq_length=100_000))
    expected = [BOS, *text.encode(), EOS]
    assert rows(dataset) == [expected, expected, [BOS, *b"short", EOS]]


def test_folders_and_globs_are_sorted(tmp_path: Path) -> None:
    root = tmp_path / "docs"
    for name in ("b/2.txt", "b/1.txt", "a.txt", ".hidden/x.txt", "c.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "empty.txt").write_text("")
    folder = open_dataset(text_options(tmp_path, root, seq_length=64))
    assert [bytes(r[1:-1]).decode() for r in rows(folder)] == ["a.txt", "b/1.txt", "b/2.txt", "c.md"]
    matched = open_dataset(text_options(tmp_path, root / "**" / "*.txt", seq_length=64))
    assert [bytes(r[1:-1]).decode() for r in rows(matched)] == ["a.txt", "b/1.txt", "b/2.txt"]


def test_the_standard_library_is_text(tmp_path: Path) -> None:
    dataset = open_dataset(text_options(tmp_path, "stdlib/json", seq_length=1 << 20))
    assert bytes(dataset.document(0).input_ids[1:-1].tolist()) == Path(json.__file__).read_bytes()
    whole = open_dataset(text_options(tmp_path, "stdlib", seq_length=512))
    assert whole.report.tokens > 3_000_000 and whole.report.files > 300


def test_library_sources_that_are_not_utf8_end_where_they_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenise_module, "_PIECE", 16)
    monkeypatch.setattr(sources_module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    (tmp_path / "lib" / "site-packages").mkdir(parents=True)
    (tmp_path / "lib" / "site-packages" / "other.py").write_text("no")
    (tmp_path / "lib" / "a.py").write_bytes(b"# fine\n" * 2000 + b"\xff")
    (tmp_path / "lib" / "b.py").write_text("x = 1")
    (tmp_path / "lib" / "c.py").write_bytes(b"\xff")
    (tmp_path / "lib" / "d.py").write_bytes(b"")
    found = rows(open_dataset(text_options(tmp_path, "stdlib", seq_length=100_000)))
    assert len(found) == 2 and found[1] == [BOS, *b"x = 1", EOS]
    assert (
        found[0][0] == BOS
        and found[0][-1] == EOS
        and bytes(found[0][1:-1]) == (b"# fine\n" * 2000)[: len(found[0]) - 2]
    )


def test_file_formats_give_the_same_rows(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    records = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4], "labels": [4]}]
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(r).encode() for r in records))
    (tmp_path / "x.json").write_text(json.dumps(records))
    (tmp_path / "y.json").write_text(json.dumps({"data": records}))
    table = pa.Table.from_pylist(records)
    pq.write_table(table, tmp_path / "x.parquet")
    saved = tmp_path / "saved" / "train"  # what datasets.DatasetDict.save_to_disk writes
    saved.mkdir(parents=True)
    with pa.OSFile(str(saved / "data-00000-of-00001.arrow"), "wb") as f, pa.ipc.new_stream(f, table.schema) as writer:
        writer.write_table(table)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (saved.parent / "dataset_dict.json").write_text(json.dumps({"splits": ["test", "train"]}))
    for name in ("x.jsonl", "x.json", "y.json", "x.parquet", "saved", "saved/train"):
        dataset = open_dataset(data_options("tokens", (str(tmp_path / name),), 8, 10, cache_dir=str(tmp_path / "c")))
        assert rows(dataset) == [[1, 2, 3], [4]], name
        assert dataset.document(0).labels.tolist() == [2, 3, IGNORE_INDEX]


@pytest.mark.parametrize("vocab_size,dtype", [(65536, np.uint16), (65537, np.int32)])
def test_large_ids_survive(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"input_ids": [0, vocab_size - 1]}))
    dataset = open_dataset(data_options("tokens", (str(path),), 8, vocab_size, cache_dir=str(tmp_path / "c")))
    assert dataset.document(0).input_ids.tolist() == [0, vocab_size - 1]
    assert dataset.document(0).labels.tolist() == [vocab_size - 1, IGNORE_INDEX]
    assert dataset.store.tokens.dtype == dtype and isinstance(dataset.store.tokens, np.memmap)


def test_second_start_does_not_tokenise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("hello world")
    first = open_dataset(text_options(tmp_path, path))
    assert first.report.tokenised_now

    def refuse(*args: object) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(dataset_module, "build_store", refuse)
    copy = tmp_path / "elsewhere.txt"
    copy.write_text("hello world")
    for again in (path, copy):  # by content, not by name
        second = open_dataset(text_options(tmp_path, again))
        assert not second.report.tokenised_now and rows(second) == rows(first)
    assert len(open_dataset(text_options(tmp_path, path, seq_length=4))) > len(first)  # cut anew, not tokenised anew
    for changed in (
        text_options(tmp_path, path, path),
        data_options("text", (str(path),), 8, 300, cache_dir=str(tmp_path / "cache")),
    ):
        with pytest.raises(AssertionError, match="tokenised again"):
            open_dataset(changed)
    path.write_text("hello wOrld")
    with pytest.raises(AssertionError, match="tokenised again"):
        open_dataset(text_options(tmp_path, path))


def build_numbers(folder: Path) -> None:
    writer = StoreWriter(folder, vocab_size=100, targets="all")
    for i in range(5):
        writer.append(np.arange(i + 1))
        writer.end_sample(0, i + 1)
    writer.close({})


@pytest.mark.parametrize(
    "damage,how",
    [(f, h) for f in ("tokens.bin", "offsets.npy", "samples.npy", "meta.json") for h in ("cut", "missing")]
    + [("tokens.bin", "grown")],
)
def test_a_damaged_store_is_built_again(tmp_path: Path, damage: str, how: str) -> None:
    open_or_build(tmp_path, "k", build_numbers)
    file = tmp_path / "k" / damage
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-5])
    elif how == "grown":
        file.write_bytes(file.read_bytes() + b"ab")
    else:
        file.unlink()
    assert open_store(tmp_path / "k") is None
    store, built = open_or_build(tmp_path, "k", build_numbers)
    assert built and store.num_samples == 5 and store.tokens.tolist()[-5:] == [0, 1, 2, 3, 4]


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "tokens.bin").write_bytes(b"half")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        open_or_build(tmp_path, "k", build)
    assert [p.name for p in tmp_path.iterdir()] == ["k.lock"]


def die_while_building(cache: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "tokens.bin").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    open_or_build(cache, "k", build)


def build_slowly(cache: Path, log: Path) -> None:
    def build(folder: Path) -> None:
        with open(log, "a") as f:
            f.write("built\n")
        time.sleep(0.3)
        build_numbers(folder)

    store, _ = open_or_build(cache, "k", build)
    assert store.num_samples == 5


def test_a_killed_builder_is_replaced_and_many_ranks_build_once(tmp_path: Path) -> None:
    ctx = multiprocessing.get_context("fork")
    cache, log = tmp_path / "cache", tmp_path / "log"
    killed = ctx.Process(target=die_while_building, args=(cache,))
    killed.start()
    killed.join(20)
    assert killed.exitcode == -signal.SIGKILL and (cache / "k.tmp" / "tokens.bin").exists()
    ranks = [ctx.Process(target=build_slowly, args=(cache, log)) for _ in range(6)]
    for p in ranks:
        p.start()
    for p in ranks:
        p.join(20)
    assert [p.exitcode for p in ranks] == [0] * 6
    assert log.read_text() == "built\n" and not (cache / "k.tmp").exists()


def test_worker_processes_give_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise_module, "_BATCH_SAMPLES", 3)  # several batches in flight, to be put in order
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": "z" * (40 - i)}) + "\n" for i in range(40)))
    alone = open_dataset(text_options(tmp_path, path, seq_length=64))
    options = text_options(tmp_path, path, seq_length=64, num_workers=2)
    elsewhere = options.config.model_copy(update={"cache_dir": str(tmp_path / "other")})
    together = open_dataset(replace(options, config=elsewhere))
    assert together.report.tokenised_now and rows(together) == rows(alone)
    with pytest.raises(DataError, match="no such folder"):
        open_dataset(replace(options, tokenizer=str(tmp_path / "no")))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """A document of 64 MB and records of 64 MB are tokenised with far less than that added to the process."""
    (tmp_path / "a.txt").write_text(("x" * 79 + "\n") * 800_000)
    (tmp_path / "b.jsonl").write_text((json.dumps({"text": "y" * 3000}) + "\n") * 21_000)
    files = f"({str(tmp_path / 'a.txt')!r}, {str(tmp_path / 'b.jsonl')!r})"
    code = (
        "from hybrid5d.data.dataset import DataOptions, open_dataset\n"  # getrusage would count the parent's peak
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) // 1024\n"
        "before = peak()\n"
        "from hybrid5d.config.schema import DataConfig\n"
        f"c = DataConfig(type='text', cache_dir={str(tmp_path / 'c')!r})\n"
        f"d = open_dataset(DataOptions(c, {files}, 512, 259))\n"
        "print(d.report.tokens, peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    tokens, megabytes = map(int, done.stdout.split())
    assert tokens > 126_000_000 and megabytes < 110


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhi \xef\xbb\xbf")
    assert rows(open_dataset(text_options(tmp_path, tmp_path / "a.txt"))) == [[256, *b"hi \xef\xbb\xbf", 257]]


def test_data_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    code = (
        "import sys; from hybrid5d.data import build, dataset\n"
        "from hybrid5d.config.schema import DataConfig\n"
        f"config = DataConfig(type='text', cache_dir={str(tmp_path)!r})\n"
        f"options = dataset.DataOptions(config, ({str(tmp_path / 'a.txt')!r},), 8, 259)\n"
        "dataset.open_dataset(options)\n"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
