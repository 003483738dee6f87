"""Conversations: which tokens the model is trained to write, against references written by hand."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hybrid5d.config.schema import DataConfig
from hybrid5d.data.chat import ChatEncoder, encode_bytes
from hybrid5d.data.chat_mask import token_mask
from hybrid5d.data.conversations import Conversation, to_conversation
from hybrid5d.data.dataset import open_dataset
from hybrid5d.data.fields import BadRecord, FieldReport
from hybrid5d.data.options import DataOptions
from hybrid5d.data.tokenizer import ByteTokenizer, FastTokenizer, load_tokenizer
from hybrid5d.errors import DataError
from tests.chat_references import CHATML, REFERENCES, SPECIAL_TOKENS, Turns
from tests.data.kit import data_options

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXTS = [
    "How are you today? I am fine, thank you.\n\n    def f(x):\n        return x  # four spaces",
    "Grüße aus Köln! 日本語のテキスト 🎉🎉 naïve café",
    "### Response: USER: ASSISTANT: [INST] a list:\n- one\n- two\n",
]
CONVERSATIONS: list[Turns] = [
    [("user", "Hi"), ("assistant", "Hello there.")],
    [("system", "Be brief."), ("user", "  2+2? "), ("assistant", "  4 \n"), ("user", "sure?"), ("assistant", "Yes")],
    [("user", "Hello"), ("assistant", "Hello"), ("user", "Hello"), ("assistant", "Hello")],  # all alike
    [("user", "äöü 🎉"), ("assistant", "🎉 日本語\n\n\n"), ("user", "x" * 40), ("assistant", "\t tab")],
    [("user", "code"), ("assistant", "def f():\n    return 1\n\n        # deep"), ("user", "ok"), ("assistant", "k")],
    [
        ("user", "why"),
        ("assistant", "<think>\nfirst\n</think>\n\nA."),
        ("user", "and"),
        ("assistant", "<think>hm</think>B"),
    ],
    [("user", "a"), ("assistant", "\n"), ("user", "b"), ("assistant", "c")],
    [("user", "end"), ("assistant", "a </s b"), ("user", "### Response:\nq"), ("assistant", "USER: no ASSISTANT: yes")],
    [("user", "what now"), ("assistant", "one"), ("user", "left open")],
]  # type: ignore[misc]
CONVERSATIONS = [[{"role": r, "content": c} for r, c in turns] for turns in CONVERSATIONS]  # type: ignore[misc]


def to_messages_of(record: dict[str, object], **keys: str) -> list[dict[str, object]]:
    return to_conversation(record, DataConfig(**keys), FieldReport(), 1).messages


def character_tokenizer() -> object:
    """Each character a token, each special token one."""
    characters = sorted(
        {c for t in [*TEXTS, json.dumps(CONVERSATIONS, ensure_ascii=False)] for c in t} | set(map(chr, range(9, 127)))
    )
    vocabulary = {c: i for i, c in enumerate(["<unk>", *characters])}
    t = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    t.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    t.decoder = tokenizers.decoders.Fuse()
    return t


def byte_level_tokenizer() -> object:
    """GPT-2's kind: merges over bytes, offsets without the leading space."""
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    t.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    t.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    t.train_from_iterator(TEXTS * 3, trainer)
    return t


def metaspace_tokenizer() -> object:
    """Llama 2's kind: the space before a word belongs to it, bytes where a character is unknown."""
    t = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    t.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", *(f"<0x{i:02X}>" for i in range(256))], show_progress=False
    )
    t.train_from_iterator([x for x in TEXTS * 3 if x.isascii()] + list(map(chr, range(32, 127))), trainer)
    return t


TOKENIZERS = {"character": character_tokenizer, "byte_level": byte_level_tokenizer, "metaspace": metaspace_tokenizer}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from transformers import PreTrainedTokenizerFast

    found = {}
    for name, make in TOKENIZERS.items():
        folder = tmp_path_factory.mktemp(name)
        fast = PreTrainedTokenizerFast(tokenizer_object=make(), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
        fast.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS})
        fast.save_pretrained(folder)
        found[name] = folder
    return found


def reference_mask(pieces: list[tuple[str, bool]], spans: np.ndarray) -> list[int]:
    """Character by character: a token is trained on if it stands for at least one character that is."""
    written = [w for text, w in pieces for _ in text]
    mask, previous = [], 0
    for start, end in spans.tolist():
        begin = previous if start == end else start  # white space that the tokenizer left out of the offsets
        mask.append(int(any(written[begin:end])))
        previous = max(previous, end)
    return mask


@pytest.mark.parametrize("template", REFERENCES)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_masks_against_the_reference(folders: dict[str, Path], kind: str, template: str) -> None:
    source, reference = REFERENCES[template]
    tokenizer = FastTokenizer(str(folders[kind]), source)
    results = ChatEncoder(tokenizer, "assistant").encode([Conversation.of(c) for c in CONVERSATIONS])
    for turns, result in zip(CONVERSATIONS, results):
        assert not isinstance(result, BadRecord), (turns, str(result))
        pieces = list(reference(turns))
        text = "".join(p for p, _ in pieces)
        if template != "tagged":
            assert tokenizer.render(turns) == text
        encoding = tokenizer._rust.encode(text, add_special_tokens=False)
        ids, spans = np.array(encoding.ids), np.array(encoding.offsets).reshape(-1, 2)
        assert result[0].tolist() == ids.tolist()
        assert result[1].tolist() == reference_mask(pieces, spans), (turns, text)
        if kind == "character":  # one token a character: the mask is the reference itself
            written = "".join(t for t, w in pieces if w)
            assert tokenizer.decode(ids[result[1] == 1], special=True) == written


@pytest.mark.parametrize("template", ["chatml", "reasoning"])
def test_train_on_all(folders: dict[str, Path], template: str) -> None:
    tokenizer = FastTokenizer(str(folders["byte_level"]), REFERENCES[template][0])
    for result in ChatEncoder(tokenizer, "all").encode([Conversation.of(c) for c in CONVERSATIONS]):
        assert not isinstance(result, BadRecord) and result[1].all() and len(result[0]) == len(result[1])


def test_offsets_to_masks() -> None:
    offsets = np.array([[0, 2], [2, 4], [4, 4], [5, 5], [5, 8], [5, 8], [8, 9], [0, 0]])
    assert token_mask(offsets, [(2, 4)]).tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert token_mask(offsets, [(4, 5)]).tolist() == [0, 0, 0, 1, 0, 0, 0, 0]  # white space left out of the offsets
    assert token_mask(offsets, [(6, 7)]).tolist() == [0, 0, 0, 0, 1, 1, 0, 0]  # two tokens of one character
    assert token_mask(offsets, [(1, 3), (8, 9)]).tolist() == [1, 1, 0, 0, 0, 0, 1, 0]
    assert token_mask(offsets, []).tolist() == [0] * 8


def test_tool_calls(folders: dict[str, Path]) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '</call>' }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = FastTokenizer(str(folders["character"]), template)
    messages = to_messages_of(
        {
            "messages": [
                {"role": "user", "content": "weather?"},
                {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]},
                {"role": "tool", "content": "sunny"},
                {"role": "assistant", "content": "It is sunny."},
            ]
        },
    )
    ((ids, mask),) = ChatEncoder(tokenizer, "assistant").encode([Conversation.of(messages)])  # type: ignore[misc]
    assert tokenizer.decode(ids[mask == 1], special=True) == "<call>look</call><|im_end|>It is sunny.<|im_end|>"


@pytest.mark.parametrize(
    "record,expected",
    [
        ({"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, ["q", "a"]),
        ({"prompt": "q", "response": "a"}, ["q", "a"]),
        ({"prompt": [{"role": "user", "content": "q"}], "response": "a"}, ["q", "a"]),
        ({"instruction": "q", "output": "a"}, ["q", "a"]),
        ({"instruction": "q", "input": "", "output": "a"}, ["q", "a"]),
        ({"instruction": "q", "input": "c", "output": "a"}, ["q\n\nc", "a"]),
        ({"messages": None, "prompt": "q", "response": "a"}, ["q", "a"]),
    ],
)
def test_record_shapes(record: dict[str, object], expected: list[str]) -> None:
    messages = to_messages_of(record)
    assert [m["role"] for m in messages] == ["user", "assistant"]
    assert [m["content"] for m in messages] == expected


def test_keys_are_configurable() -> None:
    keys = {"messages_key": "conversation", "prompt_key": "question", "response_key": "answer", "output_key": "target"}
    assert to_messages_of({"question": "q", "answer": "a", "messages": 1}, **keys)[1]["content"] == "a"
    assert to_messages_of({"instruction": "q", "target": "a"}, **keys)[1]["content"] == "a"


def test_byte_format() -> None:
    tokenizer = ByteTokenizer()
    ids, mask = encode_bytes(Conversation.of(CONVERSATIONS[1]), tokenizer, "assistant")
    assert tokenizer.decode(ids.tolist()).startswith("<|system|>\nBe brief.\n<|user|>\n  2+2? \n<|assistant|>\n  4 \n")
    assert tokenizer.decode(ids[mask == 1].tolist()) == "  4 \nYes"
    assert ids[0] == 256 and (ids == 257).sum() == 2 and mask[ids == 257].all()
    assert encode_bytes(Conversation.of(CONVERSATIONS[1]), tokenizer, "all")[1].all()


def chat_options(tmp_path: Path, path: Path, tokenizer: str, **kwargs: object) -> DataOptions:
    return data_options(
        "chat",
        (str(path),),
        64,
        1000,
        tokenizer=tokenizer,
        cache_dir=str(tmp_path / "cache"),
        **kwargs,  # type: ignore[arg-type]
    )


def test_chat_dataset(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, template = tmp_path / "x.jsonl", tmp_path / "chatml.jinja"
    path.write_text("".join(json.dumps({"messages": c}) + "\n" for c in CONVERSATIONS[:3]))
    template.write_text(CHATML)
    folder = str(folders["byte_level"])
    options = chat_options(tmp_path, path, folder, chat_template=str(template))
    dataset = open_dataset(options)
    tokenizer = FastTokenizer(folder, CHATML)
    for i, (ids, mask) in enumerate(
        ChatEncoder(tokenizer, "assistant").encode([Conversation.of(c) for c in CONVERSATIONS[:3]])
    ):  # type: ignore[misc]
        d = dataset.document(i)
        assert d.input_ids.tolist() == ids.tolist()[:64]
        assert d.labels.tolist() == [t if m else -100 for t, m in zip(ids[1:64], mask[1:64])] + [-100]
    assert not open_dataset(options).report.tokenised_now
    template.write_text(CHATML.replace("im_start", "start_header_id"))
    assert open_dataset(options).report.tokenised_now  # the template is part of the key


def test_chat_faults(folders: dict[str, Path], tmp_path: Path) -> None:
    path, template = tmp_path / "x.jsonl", tmp_path / "t.jinja"
    bad = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    path.write_text("".join(json.dumps({"messages": c}) + "\n" for c in [CONVERSATIONS[0], bad, CONVERSATIONS[0], bad]))
    folder = str(folders["byte_level"])
    with pytest.raises(DataError, match="has no chat template"):
        open_dataset(chat_options(tmp_path, path, folder))
    template.write_text(REFERENCES["llama2"][0])
    with pytest.raises(DataError) as e:
        open_dataset(chat_options(tmp_path, path, folder, chat_template=str(template)))
    reason = "the chat template refuses the conversation: user and assistant must alternate"
    assert str(e.value).split("\n") == [f"{path}:2: {reason}", f"{path}:4: {reason}"]
    template.write_text("{{ no_such_name.field }}")
    with pytest.raises(DataError, match="fails on one question and answer: 'no_such_name' is undefined"):
        open_dataset(chat_options(tmp_path, path, folder, chat_template=str(template)))
    template.write_text("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match="leaves out what the assistant says"):
        open_dataset(chat_options(tmp_path, path, folder, chat_template=str(template)))


def test_template_that_adds_to_an_answer(folders: dict[str, Path]) -> None:
    """What the template writes because of an answer's content is not missed by the comparison with the marked text."""
    template = CHATML + "{% if messages[-1].content == 'Hello there.' %}EXTRA{% endif %}"
    tokenizer = FastTokenizer(str(folders["character"]), template)
    ((ids, mask),) = ChatEncoder(tokenizer, "assistant").encode([Conversation.of(CONVERSATIONS[0])])  # type: ignore[misc]
    assert tokenizer.decode(ids[mask == 1], special=True) == "Hello there.<|im_end|>\nEXTRA"


def test_text_that_looks_like_a_mark(folders: dict[str, Path]) -> None:
    """The marks of the search are ordinary text where a user or the model wrote them."""
    tokenizer = FastTokenizer(str(folders["character"]), CHATML)
    for said in ("Zq7turn9xJ5", "Zq7turn1xJ5", "Zq7turn0xJ5 Zq7turn3xJ5"):
        talk = [{"role": "user", "content": said, "name": "x"}, {"role": "assistant", "content": f"{said}."}]
        ((ids, mask),) = ChatEncoder(tokenizer, "assistant").encode([Conversation.of(talk)])  # type: ignore[misc]
        assert tokenizer.decode(ids[mask == 1], special=True) == f"{said}.<|im_end|>"


def test_generation_spans_are_asked_for_one_at_a_time(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads encode; transformers 4 keeps the turns of one rendering in the template that they share."""
    tokenizer = FastTokenizer(str(folders["character"]), REFERENCES["tagged"][0])
    running: list[int] = []

    def render(*_: object, **__: object) -> object:
        assert not running
        running.append(1)
        time.sleep(0.05)
        running.pop()
        return ["text"], [[(0, 1)]]

    monkeypatch.setattr("transformers.utils.chat_template_utils.render_jinja_template", render)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(tokenizer.render_generation_spans, [CONVERSATIONS[0]] * 4))
    assert found == [("text", [(0, 1)])] * 4


def test_template_that_hides_its_turns(folders: dict[str, Path], tmp_path: Path) -> None:
    """An answer that decides what the template writes elsewhere cannot be told apart: refused, not guessed."""
    template = "{% for m in messages %}{{ m.content | length ~ ':' ~ m.content ~ ';' }}{% endfor %}"
    tokenizer = FastTokenizer(str(folders["character"]), template)
    (result,) = ChatEncoder(tokenizer, "assistant").encode([Conversation.of(CONVERSATIONS[0])])
    assert isinstance(result, BadRecord) and "cannot be found" in str(result)


def test_bos_only_where_the_tokenizer_adds_it(folders: dict[str, Path], tmp_path: Path) -> None:
    t = tokenizers.Tokenizer.from_file(str(folders["byte_level"] / "tokenizer.json"))
    t.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", t.token_to_id("<s>"))]
    )
    for file in folders["byte_level"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    t.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.txt").write_text("hello")
    for folder, first in ((folders["byte_level"], []), (tmp_path, [t.token_to_id("<s>")])):
        options = data_options(
            "text", (str(tmp_path / "x.txt"),), 64, 1000, tokenizer=str(folder), cache_dir=str(tmp_path / "cache")
        )
        ids = open_dataset(options).document(0).input_ids.tolist()
        body = t.encode("hello", add_special_tokens=False).ids
        assert ids == [*first, *body, t.token_to_id("</s>")]


def test_padding_and_truncation_of_the_folder_are_off(folders: dict[str, Path], tmp_path: Path) -> None:
    t = tokenizers.Tokenizer.from_file(str(folders["byte_level"] / "tokenizer.json"))
    t.enable_truncation(4)
    t.enable_padding(length=64)
    for file in folders["byte_level"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    t.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path), model_vocab_size=1000)
    (ids,) = tokenizer.encode_batch(["a long line of text, longer than four tokens"])
    assert tokenizer.decode(ids) == "a long line of text, longer than four tokens"  # type: ignore[union-attr]
