"""Records of conversations, in the shapes that people write them, as one form."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hybrid5d.config.schema import DataConfig
from hybrid5d.data.fields import RECORD_WEIGHTS, BadRecord, FieldReport, check_weight, given, keys_of, object_of

Message = dict[str, Any]
Turn = tuple[Message, bool | None]  # and what the record says of it: learnt, context, or nothing
ROLE_ALIASES = {
    "human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "observation": "tool",
    "tool_response": "tool", "function_response": "tool",
}  # fmt: skip
CALL_ROLES = ("function_call", "tool_call")  # turns of the model whose text is a call, or a list of calls, as JSON
TURN_FLAGS = ("loss_mask", "weight", "train", "trainable", "training")
SYSTEM_FIELDS = ("system", "system_prompt")
TEMPLATE_FIELDS = ("tools", "documents", "chat_template_kwargs")
# Statements about targets or contents that the record makes and no conversation can honour, with what to do instead.
REFUSED = {
    "loss_mask": "put it on the turns", "completion_mask": "put loss_mask on the turns",
    "assistant_masks": "put loss_mask on the turns, or use data.type: tokens", "input_ids": "use data.type: tokens",
    **dict.fromkeys(("images", "image", "videos", "video", "audios", "audio"), "rows are text; leave it out"),
}  # fmt: skip
_TURN_READ = ("role", "from", "content", "value", *TURN_FLAGS)


@dataclass(frozen=True)
class Conversation:
    """Turns, which of them are learnt, and what else the template is given.

    Attributes:
        messages: role, content and what else the template may read.
        learned: by turn, what the record says; None where its role decides.
        options: keyword arguments of the template (tools, documents, those of chat_template_kwargs).
    """

    messages: list[Message]
    learned: tuple[bool | None, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, messages: list[Message]) -> Conversation:
        """Plain turns."""
        return cls(messages, (None,) * len(messages))

    def own_turns(self) -> list[int]:
        """Turns that `train_on: assistant` learns."""
        said = zip(self.messages, self.learned)
        return [i for i, (m, learnt) in enumerate(said) if (m["role"] == "assistant" if learnt is None else learnt)]

    def left_out(self) -> list[int]:
        """Turns that the record says are context."""
        return [i for i, said in enumerate(self.learned) if said is False]


def to_conversation(record: Any, keys: DataConfig, report: FieldReport, line: int) -> Conversation:
    """The conversation of one record; fields that nothing reads go to the report.

    Raises:
        BadRecord: no conversation, nothing to learn, or a statement that cannot be honoured.
    """
    record = object_of(record)
    check_weight(record)
    for name, fix in REFUSED.items():
        if record.get(name) not in (None, "", []):
            raise BadRecord(f"{name!r} of a conversation is not read. Fix: {fix}")
    written, used = _turns(record, keys)
    turns = _with_context(record, _check_messages(written, used[0], report, line))
    options = _template_options(record)
    known = {*used, *SYSTEM_FIELDS, "history", *RECORD_WEIGHTS, *TEMPLATE_FIELDS}
    unread = [name for name in record if name not in known and given(record, name)]
    report.unread(line, [*unread, *(name for name in options if not report.in_template(name))])
    if not any(message["role"] == "assistant" or said for message, said in turns):
        raise BadRecord(f"{used[0]!r} has no assistant turn, so there is nothing to learn from it")
    return Conversation([message for message, _ in turns], tuple(said for _, said in turns), options)


def _turns(record: dict[str, Any], keys: DataConfig) -> tuple[Any, list[str]]:
    """(turns as they are written, names of the fields they come from): the first shape whose question is there."""
    if given(record, keys.messages_key):
        return record[keys.messages_key], [keys.messages_key]
    if given(record, keys.prompt_key):
        used = [keys.prompt_key, keys.response_key]
        prompt, response = record[keys.prompt_key], _answer(record, used[0], used[1], "data.response_key")
        if isinstance(prompt, list):  # a conversation that ends before the answer
            return [
                *prompt,
                *(response if isinstance(response, list) else [_turn("assistant", response, used[1])]),
            ], used
        return [_turn("user", prompt, used[0]), _turn("assistant", response, used[1])], used
    if given(record, keys.instruction_key):
        used = [keys.instruction_key, keys.input_key, keys.output_key]
        question = _text(record[used[0]], used[0])
        if record.get(used[1]):
            question = f"{question}\n\n{_text(record[used[1]], used[1])}"
        fix = "data.output_key, and its context's in data.input_key"
        answer = _turn("assistant", _answer(record, used[0], used[2], fix), used[2])
        return [{"role": "user", "content": question}, answer], used
    raise BadRecord(
        f"no key {keys.messages_key!r} (nor {keys.prompt_key!r}/{keys.response_key!r},"
        f" nor {keys.instruction_key!r}/{keys.output_key!r}); its keys: {keys_of(record)}."
        " Fix: data.messages_key, data.prompt_key or data.instruction_key"
    )


def _answer(record: dict[str, Any], question: str, answer: str, key: str) -> Any:
    if given(record, answer):
        return record[answer]
    raise BadRecord(
        f"{question!r} without {answer!r}; its keys: {keys_of(record)}. Fix: name the answer's field in {key}"
    )


def _turn(role: str, content: Any, key: str) -> Message:
    return {"role": role, "content": _text(content, key)}


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise BadRecord(f"{key!r} must be a string, not {type(value).__name__}")
    return value


def _check_messages(value: Any, key: str, report: FieldReport, line: int) -> list[Turn]:
    if not isinstance(value, list):
        raise BadRecord(f"{key!r} must be a list of messages, not {type(value).__name__}")
    if not value:
        raise BadRecord(f"{key!r} is an empty conversation")
    turns: list[Turn] = []
    unread: set[str] = set()
    for place, raw in enumerate(value):
        where = f"{key}[{place}]"
        if not isinstance(raw, dict):
            raise BadRecord(f"{where} must be an object with role and content, not {type(raw).__name__}")
        role, content = raw.get("role", raw.get("from")), raw.get("content", raw.get("value"))
        if not isinstance(role, str):
            raise BadRecord(f"{where} has no role")
        if content is None and raw.get("tool_calls"):
            content = ""
        if not isinstance(content, str):
            raise BadRecord(f"{where}.content must be a string, not {type(content).__name__}")
        rest = {k: v for k, v in raw.items() if k not in _TURN_READ and v is not None}
        unread |= {f"{key}[].{name}" for name in rest if not report.in_template(name)}
        message = {"role": ROLE_ALIASES.get(role, role), "content": content, **rest}
        if role in CALL_ROLES:
            message = _call(content, rest, report.in_template("tool_calls"))
        turns.append((message, _learned(raw, where)))
    report.unread(line, unread)
    return turns


def _call(content: str, rest: dict[str, Any], in_template: bool) -> Message:
    """A call of tools as the model's turn: `tool_calls` where the template writes them and the text is a call."""
    try:
        calls = json.loads(content)
    except ValueError:
        calls = None
    calls = [calls] if isinstance(calls, dict) else calls
    if not in_template or not isinstance(calls, list) or not all(isinstance(c, dict) and "name" in c for c in calls):
        return {"role": "assistant", "content": content, **rest}
    functions = [{"name": c["name"], "arguments": c.get("arguments", {})} for c in calls]
    written = [{"type": "function", "function": f} for f in functions]
    return {"role": "assistant", "content": "", "tool_calls": written, **rest}


def _learned(turn: dict[str, Any], where: str) -> bool | None:
    """What a turn's own field says: 0 or 1. A fraction has no meaning here, see `fields.RECORD_WEIGHTS`."""
    said = {name: turn[name] for name in TURN_FLAGS if given(turn, name)}
    for name, value in said.items():
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise BadRecord(f"{where}.{name}={value!r}: only 0 and 1 have a meaning in a mean over tokens")
    if len(set(said.values())) > 1:
        raise BadRecord(f"{where}: {' and '.join(said)} say both that it is learnt and that it is not")
    return bool(next(iter(said.values()))) if said else None


def _with_context(record: dict[str, Any], turns: list[Turn]) -> list[Turn]:
    """`history` (pairs of question and answer) and the system text before the turns."""
    system = [turns.pop(0)] if turns[0][0]["role"] == "system" else []
    for name in SYSTEM_FIELDS:
        if record.get(name) in (None, ""):
            continue
        text = _text(record[name], name)
        if system and system[0][0]["content"] != text:
            raise BadRecord(f"{name!r} and the conversation's own system turn differ")
        system = system or [(_turn("system", text, name), None)]
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in history):
        raise BadRecord("'history' must be a list of [question, answer]")
    past: list[Turn] = []
    for place, (question, answer) in enumerate(history):
        past.append((_turn("user", question, f"history[{place}][0]"), None))
        past.append((_turn("assistant", answer, f"history[{place}][1]"), None))
    return [*system, *past, *turns]


def _template_options(record: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the template that the record gives."""
    options: dict[str, Any] = {}
    for name in ("tools", "documents"):
        if record.get(name) not in (None, "", []):
            value = _from_text(record[name], name)
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                raise BadRecord(f"{name!r} must be a list of objects (or JSON text of one)")
            options[name] = value
    more = _from_text(record.get("chat_template_kwargs"), "chat_template_kwargs") or {}
    if not isinstance(more, dict):
        raise BadRecord(f"'chat_template_kwargs' must be an object, not {type(more).__name__}")
    return options | {name: value for name, value in more.items() if value is not None}


def _from_text(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as e:
        raise BadRecord(f"{name!r} is text and not JSON: {e}") from None
