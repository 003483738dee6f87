"""Two ways to a token's mask agree; workers encode what the caller would; a killed one is reported."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from hybrid5d.data.workers import _no_main_module, encode_batches
from hybrid5d.errors import DataError

tokenizers = pytest.importorskip("tokenizers")
hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as st  # noqa: E402

from hybrid5d.data.chat_mask import span_mask, token_mask  # noqa: E402

TEXT = "Hello there, äöü 🎉 日本語\n\n  def f():\n\treturn 1  <|end|> naïve"


def byte_level(*, normalizer: object = None, prefix: bool = False, **added: bool) -> object:
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    t.normalizer = normalizer
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\p{L}+|\d|[^\p{L}\d]+"), "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False, trim_offsets=False)
    t.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    t.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    t.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    t.train_from_iterator([TEXT] * 3, trainer)
    t.add_special_tokens([tokenizers.AddedToken("<|end|>", **added)])
    return t


PLAIN = byte_level()
TOKENIZERS = [
    PLAIN,
    byte_level(prefix=True),
    byte_level(lstrip=True),
    byte_level(rstrip=True),
    *(byte_level(normalizer=n) for n in (tokenizers.normalizers.NFC(), tokenizers.normalizers.Lowercase())),
    byte_level(normalizer=tokenizers.normalizers.Sequence([tokenizers.normalizers.NFKC()])),
]
pieces = st.lists(
    st.sampled_from([*TEXT, "<|end|>", "e\u0301", "q\u0301\u0323", "\u2003", "🎉🎉"]) | st.characters(codec="utf-8")
)


@hypothesis.given(pieces.map("".join), st.lists(st.integers(0, 60), max_size=6), st.sampled_from(TOKENIZERS))
@hypothesis.settings(deadline=None, max_examples=300)
def test_masks_agree(text: str, cuts: list[int], tokenizer: object) -> None:
    """Of random spans: questions at the spans' ends, and the list of all offsets."""
    edges = sorted({min(c, len(text)) for c in cuts})
    spans = list(zip(edges[::2], edges[1::2]))
    encoding = tokenizer.encode(text, add_special_tokens=False)  # type: ignore[attr-defined]
    expected = token_mask(np.array(encoding.offsets, np.int32).reshape(-1, 2), spans).tolist()
    assert span_mask(encoding, len(encoding.ids), spans).tolist() == expected


def test_a_tokenizer_travels(tmp_path: Path) -> None:
    """Pickled and read again without its folder: ids, masks, templates and special tokens are the same."""
    from transformers import PreTrainedTokenizerFast

    from hybrid5d.data.chat import ChatEncoder
    from hybrid5d.data.conversations import Conversation
    from hybrid5d.data.tokenizer import FastTokenizer

    fast = PreTrainedTokenizerFast(tokenizer_object=PLAIN, eos_token="<|end|>", bos_token="<s>")
    template = "{% for m in messages %}{{ bos_token + m.role + ':' + m.content + eos_token }}{% endfor %}"
    fast.save_pretrained(tmp_path / "t")
    encoder = ChatEncoder(FastTokenizer(str(tmp_path / "t"), template), "assistant")
    body = pickle.dumps(encoder)
    for file in (tmp_path / "t").iterdir():
        file.unlink()
    talk = [Conversation.of([{"role": "user", "content": "äö"}, {"role": "assistant", "content": "Hello 🎉"}])]
    copy = pickle.loads(body)
    for one, other in zip(encoder.encode(talk), copy.encode(talk), strict=True):
        assert one[0].tolist() == other[0].tolist() and one[1].tolist() == other[1].tolist()  # type: ignore[index]
        assert 0 < one[1].sum() < len(one[1])  # type: ignore[index]
    assert encoder.tokenizer.decode(one[0].tolist()) == copy.tokenizer.decode(one[0].tolist())  # type: ignore[index]


def test_an_empty_span_marks_nothing() -> None:
    """An empty answer without an end-of-turn mark: at the text's beginning, and inside of a token."""
    t = tokenizers.Tokenizer(tokenizers.models.WordLevel({"hello": 0, "world": 1}, unk_token="hello"))
    t.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    encoding = t.encode("hello world")
    for place in range(12):
        spans = [(place, place)]
        assert span_mask(encoding, 2, spans).tolist() == [0, 0]
        assert token_mask(np.array(encoding.offsets), spans).tolist() == [0, 0]


def die_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def square(number: int) -> int:
    return number * number


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_order_is_kept(workers: int) -> None:
    assert list(encode_batches(square, ((n, -n) for n in range(20)), workers)) == [(n * n, -n) for n in range(20)]


def test_a_killed_process_is_reported() -> None:
    with pytest.raises(DataError, match=r"a tokenising process of 2 died .* Fix: a smaller data.num_workers"):
        list(encode_batches(die_at_three, ((n, n) for n in range(20)), 2))


def test_a_process_killed_while_the_caller_is_busy_is_reported() -> None:
    results = encode_batches(die_at_three, ((n, n) for n in range(20)), 1)
    assert [next(results), next(results)] == [(0, 0), (1, 1)]  # 2 and 3 are in flight
    time.sleep(1)
    with pytest.raises(DataError, match="a tokenising process of 1 died"):
        list(results)


def test_two_threads_leave_the_main_module_where_it_was() -> None:
    main, entered, release = sys.modules["__main__"], threading.Event(), threading.Event()

    def first() -> None:
        with _no_main_module():
            entered.set()
            release.wait(0.2)

    def second() -> None:
        entered.wait()
        with _no_main_module():
            one.join()

    one, two = threading.Thread(target=first), threading.Thread(target=second)
    try:
        for thread in (one, two):
            thread.start()
        for thread in (one, two):
            thread.join()
        assert sys.modules["__main__"] is main
    finally:
        sys.modules["__main__"] = main


def test_workers_end_with_a_killed_caller() -> None:
    script = (
        "import itertools, operator, sys, time\n"
        "from hybrid5d.data.workers import encode_batches\n"
        "for result, _ in encode_batches(operator.neg, ((n, n) for n in itertools.count()), 2):\n"
        "    if result == -20:\n"
        "        print('busy', flush=True)\n"
        "        time.sleep(60)\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert caller.stdout is not None and caller.stdout.readline() == "busy\n"
        started = psutil.Process(caller.pid).children(recursive=True)
        assert len(started) >= 3  # the server and two workers
    finally:
        caller.kill()
        caller.wait()
    _, alive = psutil.wait_procs(started, timeout=10)
    for process in alive:
        process.kill()
    assert not alive


def test_a_script_without_a_guard(tmp_path: Path) -> None:
    """Worker processes do not run the caller's script again."""
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(600)))
    script = tmp_path / "script.py"
    script.write_text(
        "from hybrid5d.config.schema import DataConfig\n"
        "from hybrid5d.data.dataset import DataOptions, open_dataset\n"
        f"c = DataConfig(type='text', cache_dir={str(tmp_path / 'c')!r}, num_workers=2)\n"
        f"o = DataOptions(c, ({str(tmp_path / 'x.jsonl')!r},), 64, 300)\n"
        "print('rows', len(open_dataset(o)))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "rows 600\n"), done.stderr
