"""Which tokens stand for which characters, from the lengths of byte-level tokens alone.

The tokenizer's own offsets cost time in it and more in Python. A byte-level BPE (GPT-2's alphabet: Llama 3, Qwen,
SmolLM2) needs none: its tokens' bytes, one after another, are the text's bytes, so a running sum of lengths says where
each token is.
"""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid5d.data.chat_mask import Span


@dataclass(frozen=True)
class ByteLengths:
    """Attributes:
    of_id: [vocabulary] int32: bytes that each id stands for.
    composes: texts are composed (NFC) first, so only a text that is composed already keeps its bytes.
    """

    of_id: np.ndarray
    composes: bool

    def mask(self, text: str, ids: np.ndarray, spans: list[Span]) -> np.ndarray | None:
        """[n] uint8: 1 for each token with at least one byte of a span of characters; None where the lengths do not
        add up to the text's (a character that the tokenizer does not know, white space that a special token took)."""
        if self.composes and not unicodedata.is_normalized("NFC", text):
            return None
        ends = self.of_id[ids].cumsum()
        plain = text.isascii()
        if (int(ends[-1]) if ends.size else 0) != (len(text) if plain else len(text.encode())):
            return None
        mask = np.zeros(ids.shape, np.uint8)
        for start, stop in spans:
            if not plain:
                start, length = len(text[:start].encode()), len(text[start:stop].encode())
                stop = start + length
            if start < stop:  # from the first token that ends behind `start` to the one that reaches `stop`
                mask[np.searchsorted(ends, start, "right") : np.searchsorted(ends, stop) + 1] = 1
        return mask


def byte_lengths(tokenizer: Any) -> ByteLengths | None:
    """Of a `tokenizers.Tokenizer`; None where its tokens are not, byte for byte, the text."""
    model = tokenizer.model
    if type(model).__name__ != "BPE" or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    normalizers, splitters, decoders = (
        _parts(getattr(tokenizer, name)) for name in ("normalizer", "pre_tokenizer", "decoder")
    )
    levels = [p for p in splitters if p["type"] == "ByteLevel"]
    if len(levels) != 1 or levels[0]["add_prefix_space"] or [p["type"] for p in decoders] != ["ByteLevel"]:
        return None
    if any(p["type"] != "NFC" for p in normalizers):
        return None
    if any(p.get("behavior") == "Removed" or p["type"] not in ("ByteLevel", "Split", "Digits") for p in splitters):
        return None
    added = tokenizer.get_added_tokens_decoder()
    if any(t.lstrip or t.rstrip for t in added.values()):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    lengths = np.zeros(max([*vocabulary.values(), *added], default=-1) + 1, np.int32)
    for token, index in vocabulary.items():
        lengths[index] = len(token)  # one character of the alphabet is one byte
    for index, token in added.items():
        lengths[index] = len(token.content.encode())
    return ByteLengths(lengths, composes=bool(normalizers))


def _parts(component: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    for several in ("normalizers", "pretokenizers", "decoders"):
        if several in state:
            return list(state[several])
    return [state]
