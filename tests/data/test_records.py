"""Fields of records: each acts, is harmless, or is refused or reported; rendered as `apply_chat_template` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybrid5d.data.dataset import Dataset, open_dataset
from hybrid5d.data.store import open_store
from hybrid5d.errors import DataError
from tests.data.kit import data_options

ANSWER = {"role": "assistant", "content": "yes"}
TALK = [
    {"role": "user", "content": "q"},
    ANSWER,
    {"role": "user", "content": "r"},
    {"role": "assistant", "content": "no"},
]
TOOLS_TEMPLATE = (
    "{% if tools %}<<{% for t in tools %}{{ t.function.name }},{% endfor %}>>{% endif %}"
    "{% if thinking %}T{% endif %}{% for d in documents or [] %}[{{ d.text }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}({{ c.function.arguments.x }}){% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def read(tmp_path: Path, kind: str, *records: dict[str, Any], **more: Any) -> Dataset:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return open_dataset(data_options(kind, (str(path),), 256, 300, cache_dir=str(tmp_path / "cache"), **more))


def learned(dataset: Dataset, row: int = 0) -> list[list[int]]:
    """Targets of each document of a row."""
    return [[t for t in d.labels.tolist() if t != -100] for d in dataset.documents(row)]


def bytes_learned(dataset: Dataset, row: int = 0) -> str:
    return "".join(chr(t) if t < 256 else "|" for document in learned(dataset, row) for t in document)


def refusal(tmp_path: Path, kind: str, record: dict[str, Any], **more: Any) -> str:
    with pytest.raises(DataError) as e:
        read(tmp_path, kind, record, **more)
    return str(e.value).partition("x.jsonl:1: ")[2]


@pytest.mark.parametrize("flag", ["loss_mask", "weight", "train", "trainable", "training"])
@pytest.mark.parametrize("no", [0, False, 0.0])
def test_turns_that_are_context(tmp_path: Path, flag: str, no: object) -> None:
    talk = [TALK[0], {**ANSWER, flag: no}, TALK[2], {**TALK[3], flag: 1}]
    assert bytes_learned(read(tmp_path, "chat", {"messages": talk})) == "no|"
    every = bytes_learned(read(tmp_path, "chat", {"messages": talk}, train_on="all"))
    assert "yes" not in every and "<|assistant|>" in every and "no|" in every


def test_a_turn_of_the_user_that_is_learned(tmp_path: Path) -> None:
    talk = [{**TALK[0], "train": True}, *TALK[1:]]
    assert bytes_learned(read(tmp_path, "chat", {"messages": talk})) == "q\nyes|no|"


@pytest.mark.parametrize(
    "record,rule",
    [
        ({"messages": [TALK[0], {**ANSWER, "weight": 0.5}]}, "messages[1].weight=0.5: only 0 and 1"),
        ({"messages": [TALK[0], {**ANSWER, "weight": 1, "train": False}]}, "weight and train say both"),
        ({"messages": TALK, "weight": 0.5}, "weight=0.5: records have no weights"),
        ({"messages": TALK, "loss_mask": [0, 1]}, "'loss_mask' of a conversation is not read"),
        ({"messages": TALK, "images": ["a.png"]}, "'images' of a conversation is not read. Fix: rows are text"),
        ({"messages": TALK, "tools": "look"}, "'tools' is text and not JSON"),
        ({"messages": TALK, "documents": [1]}, "'documents' must be a list of objects"),
        ({"messages": TALK, "chat_template_kwargs": [1]}, "'chat_template_kwargs' must be an object, not list"),
        ({"messages": TALK, "history": ["q"]}, "'history' must be a list of [question, answer]"),
        (
            {"messages": [{"role": "system", "content": "a"}, *TALK], "system": "b"},
            "'system' and the conversation's own system turn differ",
        ),
        (
            {"instruction": "q", "context": "c", "response": "a"},
            "'instruction' without 'output'; its keys: context, instruction, response. Fix: name the answer's field in"
            " data.output_key, and its context's in data.input_key",
        ),
    ],
)
def test_conversations_that_cannot_be_honoured(tmp_path: Path, record: dict[str, Any], rule: str) -> None:
    assert rule in refusal(tmp_path, "chat", record)


@pytest.mark.parametrize("field", ["system", "system_prompt"])
def test_system_and_history_come_first(tmp_path: Path, field: str) -> None:
    record = {"instruction": "q", "output": "a", field: "Be brief.", "history": [["x", "y"]]}
    (document,) = read(tmp_path, "chat", record).documents(0)
    text = "<|system|>\nBe brief.\n<|user|>\nx\n<|assistant|>\ny|<|user|>\nq\n<|assistant|>\na|"
    assert "".join(chr(i) if i < 256 else "|" for i in document.input_ids[1:].tolist()) == text


def test_dolly_with_its_keys(tmp_path: Path) -> None:
    record = {"instruction": "q", "context": "c", "response": "a", "category": "x"}
    dataset = read(tmp_path, "chat", record, input_key="context", output_key="response")
    assert bytes_learned(dataset) == "a|" and dataset.report.notices == ()


def test_unread_fields_are_reported_once(tmp_path: Path) -> None:
    records = [{"messages": TALK, "id": 1}, {"messages": TALK, "rejected": "x"}, {"messages": TALK, "rejected": "y"}]
    records.append({"messages": [{**TALK[0], "name": "Ann", "id": 4}, ANSWER], "score": None, "tools": [{"a": 1}]})
    for _ in range(2):  # again from the cache
        assert [n.partition("x.jsonl: ")[2] for n in read(tmp_path, "chat", *records).report.notices] == [
            "field 'messages[].name' is not read (1 record, the first in line 4)",
            "field 'rejected' is not read (2 records, the first in line 2)",
            "field 'tools' is not read (1 record, the first in line 4)",
        ]
    for kind, record in (("tokens", {"input_ids": [1, 2], "reward": 1.0}), ("text", {"text": "abc", "reward": 1.0})):
        (notice,) = read(tmp_path, kind, record).report.notices
        assert "field 'reward' is not read (1 record, the first in line 1)" in notice


ROWS: list[tuple[dict[str, Any], list[list[int]], list[list[int]]]] = [  # record, ids of documents, targets of each
    ({"attention_mask": [1, 1, 1, 1, 0, 0]}, [[1, 2, 3, 4]], [[2, 3, 4]]),
    ({"attention_mask": [0, 0, True, 1.0, 1, 1]}, [[3, 4, 5, 6]], [[4, 5, 6]]),
    ({"loss_mask": [0, 0, 1, 0, 1, 1]}, [[1, 2, 3, 4, 5, 6]], [[3, 5, 6]]),
    ({"completion_mask": [0, 0, 0, 1, 1, 0], "labels": [1, 2, 3, 9, 5, 6]}, [[1, 2, 3, 4, 5, 6]], [[9, 5]]),
    ({"assistant_masks": [0, 1, 0, 1, 0, 0], "loss_mask": [0, 0, 0, 1, 1, 1]}, [[1, 2, 3, 4, 5, 6]], [[4]]),
    ({"position_ids": [0, 1, 2, 0, 1, 2]}, [[1, 2, 3], [4, 5, 6]], [[2, 3], [5, 6]]),
    ({"seq_lens": [1, 3, 2]}, [[1], [2, 3, 4], [5, 6]], [[], [3, 4], [6]]),
    (
        {"position_ids": [1, 0, 1, 0, 1, 1], "attention_mask": [0, 1, 1, 1, 1, 0], "seq_lens": [2, 2]},
        [[2, 3], [4, 5]],
        [[3], [5]],
    ),
]


@pytest.mark.parametrize("fields,ids,targets", ROWS)
def test_masks_and_documents_of_token_rows(
    tmp_path: Path, fields: dict[str, Any], ids: list[list[int]], targets: list[list[int]]
) -> None:
    dataset = read(tmp_path, "tokens", {"input_ids": [7, 8]}, {"input_ids": [1, 2, 3, 4, 5, 6], **fields})
    assert [d.input_ids.tolist() for d in dataset.documents(1)] == ids and learned(dataset, 1) == targets
    assert {d.row_id for d in dataset.documents(1)} == {1} and len(dataset.documents(0)) == 1


@pytest.mark.parametrize(
    "fields,rule",
    [
        ({"attention_mask": [1, 0, 1]}, "attention_mask[1]=0 between tokens"),
        ({"attention_mask": [0, 0, 0]}, "attention_mask is all 0"),
        ({"attention_mask": [1, 1]}, "2 attention_mask for 3 input_ids"),
        ({"loss_mask": [0, 0.5, 1]}, "loss_mask[1]=0.5 is not an integer"),
        ({"completion_mask": [0, 2, 1]}, "completion_mask[1]=2 is neither 0 nor 1"),
        ({"position_ids": [5, 6, 7]}, "position_ids[0]=5: positions count from 0"),
        ({"position_ids": [0, 1]}, "2 position_ids for 3 input_ids"),
        ({"seq_lens": [1, 1]}, "seq_lens must be lengths of 1 or more that add up to the row's 3 tokens"),
        (
            {"seq_lens": [1, 2], "position_ids": [0, 1, 0]},
            "position_ids and seq_lens cut the row into different documents",
        ),
        ({"weight": 2}, "weight=2: records have no weights"),
    ],
)
def test_token_rows_that_cannot_be_honoured(tmp_path: Path, fields: dict[str, Any], rule: str) -> None:
    assert rule in refusal(tmp_path, "tokens", {"input_ids": [1, 2, 3], **fields})


def test_documents_of_one_token_hold_no_target(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of the 1 rows has a token to learn"):
        read(tmp_path, "tokens", {"input_ids": [1, 2, 3], "seq_lens": [1, 1, 1]})


def test_a_row_cut_short_keeps_its_documents_apart(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2, 3, 4, 5, 6], "seq_lens": [2, 2, 2]}))
    options = data_options("tokens", (str(path),), 4, 300, cache_dir=str(tmp_path / "c"))
    assert [d.input_ids.tolist() for d in open_dataset(options).documents(0)] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("name", ["tokens.bin", "labels.bin", "offsets.npy", "documents.npy"])
def test_other_content_of_the_same_size_is_no_store(tmp_path: Path, name: str) -> None:
    record = {"input_ids": [1, 2, 3, 4], "seq_lens": [2, 2]}
    read(tmp_path, "tokens", record)
    (folder,) = (p for p in (tmp_path / "cache").iterdir() if p.is_dir())
    body = bytearray((folder / name).read_bytes())
    body[-1] ^= 1
    (folder / name).write_bytes(body)
    assert open_store(folder) is None
    again = read(tmp_path, "tokens", record)
    assert again.report.tokenised_now and [d.input_ids.tolist() for d in again.documents(0)] == [[1, 2], [3, 4]]


def test_what_the_template_is_given(tmp_path: Path) -> None:
    """Tools, documents and more keyword arguments, calls and observations: the text is transformers' own."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    t = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(i): i for i in range(128)}, unk_token="?"))
    t.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    t.decoder = tokenizers.decoders.Fuse()
    hf = transformers.PreTrainedTokenizerFast(tokenizer_object=t)
    hf.chat_template = TOOLS_TEMPLATE
    hf.save_pretrained(tmp_path / "t")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    documents, call = [{"title": "a", "text": "doc"}], {"name": "look", "arguments": {"x": 3}}
    record = {
        "conversations": [
            {"from": "human", "value": "weather?"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "sunny"},
            {"from": "gpt", "value": "It is sunny."},
        ],
        "tools": json.dumps(tools), "documents": documents, "chat_template_kwargs": {"thinking": True},
    }  # fmt: skip
    dataset = read(tmp_path, "chat", record, tokenizer=str(tmp_path / "t"), messages_key="conversations")
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    ]
    expected = hf.apply_chat_template(messages, tools=tools, documents=documents, thinking=True, tokenize=False)
    assert expected.startswith("<<look,>>T[doc]<user>weather?;<assistant>!look(3);<tool>sunny;")
    assert hf.decode(dataset.document(0).input_ids) == expected and dataset.report.notices == ()
    assert hf.decode([i for d in learned(dataset) for i in d]) == "!look(3);It is sunny.;"
