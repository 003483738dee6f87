"""Conversations become tokens with a mask of targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from hybrid5d.data.chat_mask import Span, TemplateError, TurnFinder
from hybrid5d.data.conversations import Conversation
from hybrid5d.data.fields import BadRecord
from hybrid5d.data.tokenizer import ByteTokenizer, FastTokenizer

TrainOn = Literal["assistant", "all"]
Encoded = tuple[np.ndarray, np.ndarray] | BadRecord  # ids [n] and mask of targets [n] uint8, or why there are none


class ChatEncoder:
    """Conversations -> (ids, mask of targets), by the tokenizer's own chat template.

    `train_on: assistant` marks what the model has to write itself: each assistant turn from where the template's
    generation prompt ends up to and including its end-of-turn mark. `all` marks every token. What a record says of its
    turns comes first: turns that are context by `loss_mask: 0` are never targets, those with 1 are.
    """

    def __init__(self, tokenizer: ByteTokenizer | FastTokenizer, train_on: TrainOn):
        """Raises TemplateError where the tokenizer's template cannot be measured."""
        self.tokenizer, self.train_on = tokenizer, train_on
        self._finder = TurnFinder(tokenizer) if isinstance(tokenizer, FastTokenizer) else None

    def encode(self, conversations: Sequence[Conversation]) -> list[Encoded]:
        """For each conversation its (ids [n], mask [n] uint8), or why it cannot be encoded."""
        if isinstance(self.tokenizer, ByteTokenizer):
            return [encode_bytes(c, self.tokenizer, self.train_on) for c in conversations]
        rendered = [self._render(c) for c in conversations]
        kept = [r for r in rendered if not isinstance(r, BadRecord)]
        encoded = self.tokenizer.encode_with_mask([text for text, _ in kept], [spans for _, spans in kept])
        results = [r if isinstance(r, BadRecord) else next(encoded) for r in rendered]
        if self.train_on == "assistant":
            return results
        return [r if isinstance(r, BadRecord) else (r[0], 1 - r[1]) for r in results]  # marked: what is left out

    def _render(self, conversation: Conversation) -> tuple[str, list[Span]] | BadRecord:
        """Text and the spans of characters that are targets; of `train_on: all`, those that are none."""
        assert self._finder is not None
        turns = conversation.own_turns() if self.train_on == "assistant" else conversation.left_out()
        try:
            return self._finder.find(conversation, turns)
        except TemplateError as e:
            return BadRecord(str(e))
        except Exception as e:  # templates raise whatever they like: TemplateError of jinja, KeyError, TypeError
            return BadRecord(f"the chat template refuses the conversation: {str(e) or type(e).__name__}")


def encode_bytes(
    conversation: Conversation, tokenizer: ByteTokenizer, train_on: TrainOn
) -> tuple[np.ndarray, np.ndarray]:
    r"""The byte tokenizer's own format: bos, then per turn `<|role|>\n`, content and `\n` (assistant: eos instead)."""
    everything = train_on == "all"
    turns = set(conversation.left_out() if everything else conversation.own_turns())
    ids: list[np.ndarray] = [np.array([tokenizer.bos_id], np.int32)]
    mask: list[np.ndarray] = [np.full(1, everything, np.uint8)]
    for turn, message in enumerate(conversation.messages):
        head, body = tokenizer.encode_batch([f"<|{message['role']}|>\n", message["content"]])
        tail = np.array([tokenizer.eos_id if message["role"] == "assistant" else ord("\n")], np.int32)
        ids += [head, body, tail]
        learned = turn not in turns if everything else turn in turns
        mask += [np.full(len(head), everything, np.uint8), np.full(len(body) + 1, learned, np.uint8)]
    return np.concatenate(ids), np.concatenate(mask)
