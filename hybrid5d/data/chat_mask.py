"""Which characters of a rendered conversation the model writes itself, and which tokens stand for them.

A chat template is an opaque program: it trims, escapes, drops and reorders. Nothing here parses it; turns are found by
rendering the same conversation with a mark in place of what an assistant says and comparing the texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol

import numpy as np

from hybrid5d.data.conversations import Conversation, Message

Span = tuple[int, int]
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


def _mark(text: str = "") -> str:
    """A content that the text does not hold: a user may have written the usual one."""
    return next(mark for n in count(7) if (mark := f"Zq{n}turnxJ5") not in text)


class TemplateError(ValueError):
    """A conversation whose assistant turns cannot be separated from the rest of its rendered text."""


class Renderer(Protocol):
    """What the search for spans needs of a tokenizer."""

    template: str | None

    @property
    def special_tokens(self) -> tuple[str, ...]: ...

    def render(self, messages: list[Message], **options: Any) -> str: ...

    def render_generation_spans(self, messages: list[Message], **options: Any) -> tuple[str, list[Span]]: ...


@dataclass(frozen=True)
class TemplateProfile:
    """What a template does with one question and one answer, measured once.

    Attributes:
        tagged: the template marks its assistant turns with `{% generation %}`; nothing else is then needed.
        closings: beginnings of what follows the last answer that may be an end-of-turn mark, longest first.
        prompts: the template has a generation prompt.
        lead: white space between the prompt and the answer: the model writes it, too.
    """

    tagged: bool
    closings: tuple[str, ...]
    prompts: bool
    lead: str


def probe_template(renderer: Renderer) -> TemplateProfile:
    """Measures the template. Raises TemplateError where there is none or it drops the answer."""
    if not renderer.template:
        raise TemplateError("the tokenizer has no chat template. Fix: set data.chat_template to a Jinja file")
    if _GENERATION_TAG.search(renderer.template):
        return TemplateProfile(True, (), True, "")
    mark = _mark()
    question = [{"role": "user", "content": "Zq7question"}]
    try:
        text, bare = renderer.render([*question, {"role": "assistant", "content": mark}]), renderer.render(question)
        prompted = renderer.render(question, add_generation_prompt=True)
    except Exception as e:  # templates raise whatever they like
        raise TemplateError(f"the chat template fails on one question and answer: {str(e) or type(e).__name__}") from e
    head, result, closing = text.partition(mark)
    if not result:
        raise TemplateError("the chat template leaves out what the assistant says")
    prompts = prompted != bare
    gap = head[len(prompted) :] if head.startswith(prompted) else ""
    lead = gap if gap.isspace() else ""
    return TemplateProfile(
        tagged=False,
        closings=_possible_marks(closing, renderer.special_tokens),
        prompts=prompts,
        lead=lead,
    )


def _possible_marks(closing: str, special_tokens: tuple[str, ...]) -> tuple[str, ...]:
    """`closing` without its trailing white space, and every beginning of it that ends with a special token."""
    ends = {len(closing.rstrip())}
    for token in special_tokens:
        ends.update(m.end() for m in re.finditer(re.escape(token), closing))
    return tuple(closing[:e] for e in sorted(ends, reverse=True) if e > 0)


class TurnFinder:
    """Finds the assistant's turns in what a template makes of conversations, each turn by itself."""

    def __init__(self, renderer: Renderer):
        """Raises TemplateError where the template cannot be measured."""
        self._renderer, self._profile = renderer, probe_template(renderer)

    def find(self, conversation: Conversation, turns: list[int]) -> tuple[str, list[Span]]:
        """Text of the conversation, and the spans of characters of `turns` with their end-of-turn marks.

        Raises TemplateError, and whatever the template raises.
        """
        messages, options = conversation.messages, conversation.options
        if self._profile.tagged and turns:
            text, spans = self._renderer.render_generation_spans(messages, **options)
            return text, _chosen(spans, messages, turns)
        text = self._renderer.render(messages, **options)
        render = partial(self._renderer.render, **options)
        return text, [_span_of_turn(render, self._profile, messages, turn, text) for turn in turns]


def _closing_length(after: str, profile: TemplateProfile) -> int:
    """Length of the end-of-turn mark at the beginning of what follows an answer."""
    return next((len(c) for c in profile.closings if after.startswith(c)), 0)


def _chosen(spans: list[Span], messages: list[Message], turns: list[int]) -> list[Span]:
    """Of what `{% generation %}` tags mark, the spans of `turns`."""
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if turns == answers:
        return spans
    if len(spans) != len(answers) or not set(turns) <= set(answers):
        raise TemplateError(
            "turns with a loss_mask of their own need one {% generation %} a turn of the assistant, and no other turn"
        )
    return [span for span, turn in zip(spans, answers) if turn in turns]


def _span_of_turn(
    render: Callable[..., str], profile: TemplateProfile, messages: list[Message], turn: int, text: str
) -> Span:
    """The span of one turn.

    Rendered with a mark as this answer alone, the text around the mark is the text around the answer, unless the
    template decides by the answer's content; then what the conversation looks like before and after the turn tells.
    """
    mark = _mark(text)
    marked = [{**m, "content": mark} if i == turn else m for i, m in enumerate(messages)]
    skeleton = render(marked)
    before, result, after = skeleton.partition(mark)
    start = stop = -1
    if result and text.startswith(before):
        start = len(before) - (len(profile.lead) if before.endswith(profile.lead) else 0)
    if result and text.endswith(after) and len(text) - len(after) >= max(start, 0):
        stop = len(text) - len(after) + _closing_length(after, profile)
    if profile.prompts and turn > 0 and messages[turn]["role"] == "assistant":
        prompt = render(messages[:turn], add_generation_prompt=True)
        if text.startswith(prompt) and (start < 0 or len(prompt) <= start):
            start = len(prompt)  # what stands between the prompt and the answer is the model's to write, too
    calls = bool(messages[turn].get("tool_calls"))
    if stop < 0 or calls:
        until = render(messages[: turn + 1])
        if text.startswith(until.rstrip()):
            stop = max(stop, len(until.rstrip()))
    if start < 0 or stop < start:
        raise TemplateError(
            f"the {messages[turn]['role']}'s message {turn} cannot be found in what the chat template makes of the"
            " conversation."
            " Fix: mark the assistant's turns in the template with {% generation %}, or data.train_on: all"
        )
    return start, stop


class Encoding(Protocol):
    """What `span_mask` needs of a `tokenizers.Encoding`."""

    @property
    def offsets(self) -> list[tuple[int, int]]: ...

    def char_to_token(self, char_pos: int) -> int | None: ...

    def token_to_chars(self, token_index: int) -> tuple[int, int] | None: ...


def span_mask(encoding: Encoding, num_tokens: int, spans: list[Span]) -> np.ndarray:
    """[n] uint8: `token_mask` of the encoding's offsets, asked for at the ends of the spans alone.

    A list of all offsets is slow in Python; it is made only where a span's end is a character that no token claims
    (white space, or what a normalizer removed).
    """
    mask = np.zeros(num_tokens, np.uint8)
    for start, stop in spans:
        if start == stop:
            continue
        first, last = encoding.char_to_token(start), encoding.char_to_token(stop - 1)
        if first is None or last is None:
            return token_mask(np.array(encoding.offsets, np.int32).reshape(-1, 2), spans)
        while last + 1 < num_tokens and (encoding.token_to_chars(last + 1) or (stop,))[0] < stop:
            last += 1  # several tokens of one character
        mask[first : last + 1] = 1
    return mask


def token_mask(offsets: np.ndarray, spans: list[Span]) -> np.ndarray:
    """[n] uint8: 1 for each token that stands for at least one character of a span.

    offsets: [n, 2] characters [start, end) of each token. Byte-level tokenizers report trimmed offsets: a token of
    nothing but white space has start == end; it stands for the characters since the token before it.
    """
    mask = np.zeros(offsets.shape[0], np.uint8)
    if not spans or not mask.size:
        return mask
    starts, ends = offsets[:, 0].astype(np.int64), offsets[:, 1].astype(np.int64)
    previous = np.zeros_like(ends)
    previous[1:] = np.maximum.accumulate(ends)[:-1]
    starts = np.where(starts == ends, np.minimum(previous, starts), starts)
    for start, stop in spans:
        mask[(starts < stop) & (ends > start) & (start < stop)] = 1
    return mask
