"""Which characters of a rendered conversation the model writes itself, and which tokens stand for them.

A chat template is an opaque program: it trims, escapes, drops and reorders. Nothing here parses it; turns are found by
rendering the same conversation with a mark in place of what an assistant says and comparing the texts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Span = tuple[int, int]
Message = dict[str, Any]
_MARK = "Zq7turn{}xJ5"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TemplateError(ValueError):
    """A conversation whose assistant turns cannot be told apart from the rest of its rendered text."""


class Renderer(Protocol):
    """What the search for spans needs of a tokenizer."""

    template: str | None

    @property
    def special_tokens(self) -> tuple[str, ...]: ...

    def render(self, conversations: list[list[Message]], *, generation_prompt: bool = False) -> list[str]: ...

    def render_generation_spans(self, conversation: list[Message]) -> tuple[str, list[Span]]: ...


@dataclass(frozen=True)
class TemplateProfile:
    """What a template does with one question and one answer, measured once.

    Attributes:
        tagged: the template marks its assistant turns with `{% generation %}`; nothing else is then needed.
        closing: text after the answer at the end of a conversation.
        closings: beginnings of `closing` that may be an end-of-turn mark on their own, longest first.
        prompts: the template has a generation prompt.
        lead: white space between the prompt and the answer: the model writes it, too.
        plain: nothing but `lead` stands between the prompt and the answer.
    """

    tagged: bool
    closing: str
    closings: tuple[str, ...]
    prompts: bool
    lead: str
    plain: bool


def probe_template(renderer: Renderer) -> TemplateProfile:
    """Measures the template. Raises TemplateError where there is none or it drops the answer."""
    if not renderer.template:
        raise TemplateError("the tokenizer has no chat template. Fix: set data.chat_template to a Jinja file")
    if _GENERATION_TAG.search(renderer.template):
        return TemplateProfile(True, "", (), True, "", False)
    mark = _MARK.format(0)
    question = [{"role": "user", "content": "Zq7question"}]
    try:
        text, bare = renderer.render([[*question, {"role": "assistant", "content": mark}], question])
        (prompted,) = renderer.render([question], generation_prompt=True)
    except Exception as e:  # templates raise whatever they like
        raise TemplateError(f"the chat template fails on one question and answer: {str(e) or type(e).__name__}") from e
    head, found, closing = text.partition(mark)
    if not found:
        raise TemplateError("the chat template leaves out what the assistant says")
    prompts = prompted != bare
    gap = head[len(prompted) :] if head.startswith(prompted) else ""
    lead = gap if gap.isspace() else ""
    return TemplateProfile(
        tagged=False,
        closing=closing,
        closings=_possible_marks(closing, renderer.special_tokens),
        prompts=prompts,
        lead=lead,
        plain=not prompts or prompted + lead == head,
    )


def _possible_marks(closing: str, special_tokens: tuple[str, ...]) -> tuple[str, ...]:
    """`closing` without its trailing white space, and every beginning of it that ends with a special token."""
    ends = {len(closing.rstrip())}
    for token in special_tokens:
        ends.update(m.end() for m in re.finditer(re.escape(token), closing))
    return tuple(closing[:e] for e in sorted(ends, reverse=True) if e > 0)


def assistant_spans(
    renderer: Renderer, profile: TemplateProfile, conversations: list[list[Message]]
) -> list[tuple[str, list[Span]]]:
    """(rendered text, character spans of the assistant's turns with their end-of-turn marks) of each conversation."""
    if profile.tagged:
        return [renderer.render_generation_spans(messages) for messages in conversations]
    texts = renderer.render(conversations)
    skeletons = (
        renderer.render([_marked(messages) for messages in conversations]) if profile.plain else [""] * len(texts)
    )
    found = []
    for messages, text, skeleton in zip(conversations, texts, skeletons):
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        spans: list[Span] | None = None
        if profile.plain and not any(messages[i].get("tool_calls") for i in turns):
            answers = [(_MARK.format(i), messages[i]["content"]) for i in turns]
            spans = _spans_of_skeleton(text, skeleton, answers, profile)
        if spans is None:
            spans = [_span_of_turn(renderer, profile, messages, turn, text) for turn in turns]
        found.append((text, spans))
    return found


def _marked(messages: list[Message]) -> list[Message]:
    """The conversation with a mark in place of each answer."""
    return [{**m, "content": _MARK.format(i)} if m["role"] == "assistant" else m for i, m in enumerate(messages)]


def _spans_of_skeleton(
    text: str, skeleton: str, turns: list[tuple[str, str]], profile: TemplateProfile
) -> list[Span] | None:
    """Reads the text as the skeleton with each mark replaced by the answer, trimmed or not; None where that fails.

    All texts between answers must be those of the skeleton, up to the last character: nothing is guessed.
    """
    literals: list[str] = []
    rest = skeleton
    for mark, _ in turns:
        literal, found, rest = rest.partition(mark)
        if not found:
            return None
        literals.append(literal)
    literals.append(rest)
    if not text.startswith(literals[0]):
        return None
    spans: list[Span] = []
    place = len(literals[0])
    for (_, content), before, literal in zip(turns, literals, literals[1:]):
        for answer in (content, content.strip(), content.rstrip(), content.lstrip()):
            if text.startswith(answer + literal, place):
                break
        else:
            return None
        end = place + len(answer)
        lead = len(profile.lead) if before.endswith(profile.lead) else 0
        spans.append((place - lead, end + _closing_length(literal, profile)))
        place = end + len(literal)
    return spans if place == len(text) else None


def _closing_length(after: str, profile: TemplateProfile) -> int:
    """Length of the end-of-turn mark at the beginning of what follows an answer."""
    return next((len(c) for c in profile.closings if after.startswith(c)), 0)


def _span_of_turn(renderer: Renderer, profile: TemplateProfile, messages: list[Message], turn: int, text: str) -> Span:
    """The span of one turn, for templates that look into the answer (reasoning, tools) or add to it.

    Rendered with a mark as this answer alone, the text around the mark is the text around the answer, unless the
    template decides by the answer's content; then what the conversation looks like before and after the turn tells.
    """
    mark = _MARK.format(turn)
    marked = [{**m, "content": mark} if i == turn else m for i, m in enumerate(messages)]
    (skeleton,) = renderer.render([marked])
    before, found, after = skeleton.partition(mark)
    start = stop = -1
    if found and text.startswith(before):
        start = len(before) - (len(profile.lead) if before.endswith(profile.lead) else 0)
    if found and text.endswith(after) and len(text) - len(after) >= max(start, 0):
        stop = len(text) - len(after) + _closing_length(after, profile)
    if profile.prompts and turn > 0:
        (prompt,) = renderer.render([messages[:turn]], generation_prompt=True)
        if text.startswith(prompt) and (start < 0 or len(prompt) <= start):
            start = len(prompt)  # what stands between the prompt and the answer is the model's to write, too
    calls = bool(messages[turn].get("tool_calls"))
    if stop < 0 or calls:
        (until,) = renderer.render([messages[: turn + 1]])
        if text.startswith(until.rstrip()):
            stop = max(stop, len(until.rstrip()))
    if start < 0 or stop < start:
        raise TemplateError(
            f"the assistant's message {turn} cannot be found in what the chat template makes of the conversation."
            " Fix: mark the assistant's turns in the template with {% generation %}, or data.train_on: all"
        )
    return start, stop


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
        mask[(starts < stop) & (ends > start)] = 1
    return mask
