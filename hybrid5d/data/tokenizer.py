"""Tokenizers: bytes, which every machine has, and the fast tokenizer of an HF folder.

Neither transformers nor tokenizers is imported before `load_tokenizer` is called for a folder: a second start, which
finds its tokens in the cache, pays for neither. `trust_remote_code` is never used.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybrid5d.data.chat_mask import Span, span_mask
from hybrid5d.errors import DataError

_TRACKING = threading.Lock()  # transformers 4 keeps a rendering's turns in the template, which threads share
BYTES = "byte"  # the name of the byte tokenizer where a folder is expected
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "config.json",
)


def has_tokenizer(folder: str | Path | None) -> bool:
    """Is there a tokenizer that this package can load in the folder?"""
    return folder is not None and any((Path(folder) / n).is_file() for n in ("tokenizer.json", "tokenizer.model"))


def tokenizer_fingerprint(name: str) -> str:
    """Hash of everything in the folder that decides how text becomes tokens (a constant for the byte tokenizer)."""
    if name == BYTES:
        return "bytes-1"
    digest = hashlib.blake2b(digest_size=20)
    for file in _FILES:
        path = Path(name) / file
        if path.is_file():
            body = path.read_bytes()
            digest.update(f"{file}:{len(body)}:".encode())
            digest.update(body)
    return digest.hexdigest()


@dataclass(frozen=True)
class ByteTokenizer:
    """The 256 bytes of UTF-8, then bos, eos, pad: 259 tokens, nothing to train, nothing to download."""

    bos_id: int = 256
    eos_id: int = 257
    pad_id: int = 258
    vocab_size: int = 259

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(t.encode("utf-8"), dtype=np.uint8).astype(np.int32) for t in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; bos, eos and pad are left out, broken UTF-8 is replaced."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class FastTokenizer:
    """The Rust tokenizer of an HF folder, with that folder's chat template.

    Attributes:
        vocab_size: one more than the highest id.
        bos_id: None where the tokenizer does not put it before a text by itself (having one in the vocabulary is not
            enough: Qwen's and SmolLM2's models were never trained with one).
        eos_id: None where the tokenizer has none.
        template: the Jinja chat template, None where there is none.
        special_tokens: texts of special and added tokens, longest first.

    An instance can be pickled, and is then read again without the folder and without transformers' loader.
    """

    def __init__(self, folder: str, chat_template: str | None = None):
        hf = _load_hf(folder)
        self._rust = hf.backend_tokenizer
        self._rust.no_padding()  # either may be switched on in tokenizer.json
        self._rust.no_truncation()
        self.vocab_size: int = max(hf.get_vocab().values()) + 1
        own = self._rust.encode("").ids  # the special tokens that its post-processor adds
        self.bos_id: int | None = hf.bos_token_id if hf.bos_token_id in own else None
        self.eos_id: int | None = hf.eos_token_id
        self.pad_id: int | None = hf.pad_token_id
        template = chat_template if chat_template is not None else hf.chat_template
        if isinstance(template, dict):  # several named templates
            template = template.get("default") or next(iter(template.values()), None)
        self.template: str | None = template
        self._named_tokens: dict[str, Any] = dict(hf.special_tokens_map)  # what a template may ask for
        added = {t.content for t in hf.added_tokens_decoder.values()} | set(hf.all_special_tokens)
        self.special_tokens: tuple[str, ...] = tuple(sorted(added, key=lambda t: (-len(t), t)))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, nothing added."""
        encodings = self._rust.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(e.ids, dtype=np.int32) for e in encodings]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of the ids, with the special tokens or without."""
        return str(self._rust.decode(list(ids), skip_special_tokens=not special))

    def encode_with_mask(
        self, texts: Sequence[str], spans: Sequence[list[Span]]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids [n], mask [n] uint8) of each text: 1 for a token with a character of the text's spans."""
        for e, marked in zip(self._rust.encode_batch(list(texts), add_special_tokens=False), spans, strict=True):
            ids = np.array(e.ids, dtype=np.int32)
            yield ids, span_mask(e, len(ids), marked)

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """The chat template's text of a conversation; raises what the template raises.

        `options`: what `apply_chat_template` takes: tools, documents, add_generation_prompt, the template's own names.
        """
        return str(self._render(messages, **options)[0][0])

    def render_generation_spans(self, messages: list[dict[str, Any]], **options: Any) -> tuple[str, list[Span]]:
        """Text of a conversation and the spans inside the template's own `{% generation %}` tags."""
        with _TRACKING:
            texts, spans = self._render(messages, return_assistant_tokens_mask=True, **options)
        return texts[0], [(int(a), int(b)) for a, b in spans[0]]

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        """What `apply_chat_template` itself calls; a worker process imports this much of transformers and no more."""
        from transformers.utils.chat_template_utils import render_jinja_template

        call: Any = render_jinja_template  # its annotation says str where a pair is returned
        return call([messages], chat_template=self.template, **{**self._named_tokens, **options})


def _load_hf(folder: str) -> Any:
    if not Path(folder).is_dir():
        raise DataError(f"{folder}: no such folder (tokenizer)")
    if not has_tokenizer(folder):
        raise DataError(f"{folder}: holds no tokenizer.json. Fix: name a folder with a fast tokenizer, or {BYTES}")
    try:
        from transformers import AutoTokenizer
    except ImportError as e:
        raise DataError(f"{folder}: an HF tokenizer needs transformers. Fix: pip install 'hybrid5d[hf]'") from e
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False, local_files_only=True)
    except Exception as e:  # the library raises whatever its parsers raise
        first = (str(e).splitlines() or [type(e).__name__])[0]
        raise DataError(f"{folder}: the tokenizer cannot be loaded: {first}") from e
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(f"{folder}: only a slow tokenizer there. Fix: save it once with use_fast=True (tokenizer.json)")
    return tokenizer


def load_tokenizer(
    name: str, *, model_vocab_size: int, chat_template: str | None = None
) -> ByteTokenizer | FastTokenizer:
    """The tokenizer `byte` or of an HF folder. Raises DataError, also where it knows more tokens than the model."""
    tokenizer = ByteTokenizer() if name == BYTES else FastTokenizer(name, chat_template)
    if tokenizer.vocab_size > model_vocab_size:
        raise DataError(
            f"{name}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model's vocab_size is"
            f" {model_vocab_size}. Fix: the model's own tokenizer, or a model with vocab_size >= {tokenizer.vocab_size}"
        )
    return tokenizer
