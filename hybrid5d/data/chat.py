"""Conversations: records of several shapes become messages, messages become tokens with a mask of targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hybrid5d.data.chat_mask import Span, TemplateError, TurnFinder
from hybrid5d.data.tokenizer import ByteTokenizer, FastTokenizer

Message = dict[str, Any]
TrainOn = Literal["assistant", "all"]
ROLE_ALIASES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}


@dataclass(frozen=True)
class ChatKeys:
    """Names of a record's fields; the first shape whose fields are there is taken: messages, prompt, instruction."""

    messages: str = "messages"
    prompt: str = "prompt"
    response: str = "response"
    instruction: str = "instruction"
    input: str = "input"
    output: str = "output"


class BadRecord(ValueError):
    """A record that is no conversation; the text says why."""


def to_messages(record: Any, keys: ChatKeys) -> list[Message]:
    """The conversation of one record. Raises BadRecord."""
    if not isinstance(record, dict):
        raise BadRecord(f"a JSON object is expected, not {type(record).__name__}")
    if record.get(keys.messages) is not None:
        return _check_messages(record[keys.messages], keys.messages)
    if keys.prompt in record or keys.response in record:
        prompt, response = record.get(keys.prompt), record.get(keys.response)
        if isinstance(prompt, list):  # a conversation that ends before the answer
            turns = [*prompt, {"role": "assistant", "content": response}]
            return _check_messages(turns, keys.prompt)
        return [
            {"role": "user", "content": _text(prompt, keys.prompt)},
            {"role": "assistant", "content": _text(response, keys.response)},
        ]
    if keys.instruction in record or keys.output in record:
        question = _text(record.get(keys.instruction), keys.instruction)
        context = record.get(keys.input)
        if context:
            question = f"{question}\n\n{_text(context, keys.input)}"
        answer = _text(record.get(keys.output), keys.output)
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    shown = ", ".join(sorted(map(str, record))[:8]) or "none"
    raise BadRecord(
        f"no key {keys.messages!r} (nor {keys.prompt!r}/{keys.response!r}, nor {keys.instruction!r}/{keys.output!r});"
        f" its keys: {shown}"
    )


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise BadRecord(f"{key!r} must be a string, not {type(value).__name__}")
    return value


def _check_messages(value: Any, key: str) -> list[Message]:
    if not isinstance(value, list):
        raise BadRecord(f"{key!r} must be a list of messages, not {type(value).__name__}")
    if not value:
        raise BadRecord(f"{key!r} is an empty conversation")
    messages = []
    for place, raw in enumerate(value):
        if not isinstance(raw, dict):
            raise BadRecord(f"{key}[{place}] must be an object with role and content, not {type(raw).__name__}")
        role, content = raw.get("role", raw.get("from")), raw.get("content", raw.get("value"))
        if not isinstance(role, str):
            raise BadRecord(f"{key}[{place}] has no role")
        calls = bool(raw.get("tool_calls"))
        if content is None and calls:
            content = ""
        if not isinstance(content, str):
            raise BadRecord(f"{key}[{place}].content must be a string, not {type(content).__name__}")
        rest = {k: v for k, v in raw.items() if k not in ("role", "from", "content", "value") and v is not None}
        messages.append({"role": ROLE_ALIASES.get(role, role), "content": content, **rest})
    if not any(m["role"] == "assistant" for m in messages):
        raise BadRecord(f"{key!r} has no assistant turn, so there is nothing to learn from it")
    return messages


Encoded = tuple[np.ndarray, np.ndarray] | BadRecord  # ids [n] and mask of targets [n] uint8, or why there are none


Rendered = tuple[str, list[Span]]  # text and the spans of characters that are targets


class ChatEncoder:
    """Messages -> (ids, mask of targets), by the tokenizer's own chat template.

    `train_on: assistant` marks what the model has to write itself: each assistant turn from where the template's
    generation prompt ends up to and including its end-of-turn mark. `all` marks every token.
    """

    def __init__(self, tokenizer: ByteTokenizer | FastTokenizer, train_on: TrainOn):
        self.tokenizer, self.train_on = tokenizer, train_on
        self._finder = TurnFinder(tokenizer) if isinstance(tokenizer, FastTokenizer) else None

    def encode(self, conversations: Sequence[list[Message]]) -> list[Encoded]:
        """For each conversation its (ids [n], mask [n] uint8), or why it cannot be encoded."""
        if isinstance(self.tokenizer, ByteTokenizer):
            return [encode_bytes(c, self.tokenizer, self.train_on) for c in conversations]
        out: list[Encoded | None] = []
        texts: list[str] = []
        spans: list[list[Span]] = []
        for result in self._render(conversations):
            if isinstance(result, BadRecord):
                out.append(result)
                continue
            out.append(None)
            texts.append(result[0])
            spans.append(result[1])
        encoded = self.tokenizer.encode_with_mask(texts, None if self.train_on == "all" else spans)
        return [next(encoded) if result is None else result for result in out]

    def _render(self, conversations: Sequence[list[Message]]) -> list[Rendered | BadRecord]:
        """All at once; if that fails, one at a time, to know which."""
        try:
            return list(self._render_all(list(conversations)))
        except Exception as e:  # templates raise whatever they like: TemplateError of jinja, KeyError, TypeError
            if len(conversations) == 1:
                known = isinstance(e, TemplateError)
                text = str(e) or type(e).__name__
                return [BadRecord(text if known else f"the chat template refuses the conversation: {text}")]
            return [self._render([messages])[0] for messages in conversations]

    def _render_all(self, conversations: list[list[Message]]) -> list[Rendered]:
        assert isinstance(self.tokenizer, FastTokenizer) and self._finder is not None
        if self.train_on == "all":
            return [(text, []) for text in self.tokenizer.render(conversations)]
        return self._finder.find(conversations)


def encode_bytes(
    messages: Sequence[Message], tokenizer: ByteTokenizer, train_on: TrainOn
) -> tuple[np.ndarray, np.ndarray]:
    r"""The byte tokenizer's own format: bos, then per turn `<|role|>\n`, content and `\n` (assistant: eos instead)."""
    ids: list[np.ndarray] = [np.array([tokenizer.bos_id], np.int32)]
    mask: list[np.ndarray] = [np.zeros(1, np.uint8)]
    for message in messages:
        assistant = message["role"] == "assistant"
        head, body = tokenizer.encode_batch([f"<|{message['role']}|>\n", message["content"]])
        tail = np.array([tokenizer.eos_id if assistant else ord("\n")], np.int32)
        ids += [head, body, tail]
        mask += [np.zeros(len(head), np.uint8), np.full(len(body) + 1, assistant, np.uint8)]
    joined = np.concatenate(ids)
    return joined, np.ones(joined.shape, np.uint8) if train_on == "all" else np.concatenate(mask)
