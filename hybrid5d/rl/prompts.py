"""Prompts with what judges their answers, and the files of them (`data.type: prompts`). Needs numpy, not torch.

A record: the prompt under data.prompt_key (text, or a list of turns), the right answer under data.answer_key where
math rewards it; all of it goes to a reward function.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybrid5d.config.schema import RunConfig
from hybrid5d.data.faults import Faults
from hybrid5d.data.fields import BadRecord, FieldReport, given, keys_of, object_of
from hybrid5d.data.order import epoch_order
from hybrid5d.data.sources import read_records, resolve_sources
from hybrid5d.data.tokenise import read_template
from hybrid5d.data.tokenizer import ByteTokenizer, FastTokenizer, load_tokenizer
from hybrid5d.errors import DataError
from hybrid5d.hf.spec import ModelSpec
from hybrid5d.rl.rewards import answers_of
from hybrid5d.rl.rollouts import bounded_steps


@dataclass(frozen=True)
class Prompt:
    """One prompt: ids int64 [n], its text, and the record that it came from."""

    ids: np.ndarray
    text: str
    row: dict[str, Any]


class PromptFiles:
    """The prompts of an RL run, `rollout_batch_size` an RL step, in an order by (data.seed, epoch); and those of
    validation.

    Raises:
        DataError: every broken record with file and line; fewer prompts than an RL step takes.
    """

    def __init__(self, config: RunConfig, spec: ModelSpec, tokenizer: str):
        self.config, self.notices = config, list[str]()
        template = read_template(config.data.chat_template)
        self.tokenizer = load_tokenizer(tokenizer, model_vocab_size=spec.vocab_size, chat_template=template)
        self.longest = prompt_length(config)
        self.stop_ids = _stop_ids(config, spec, self.tokenizer)
        self.prompts = self._read(config.data.train_data_paths or ())
        checks = config.runner.val_check_interval > 0
        self.validation = self._read(config.data.val_data_paths or ()) if checks else []
        size = config.data.rollout_batch_size or 1
        self.steps_per_epoch, left = divmod(len(self.prompts), size)
        if not self.steps_per_epoch:
            raise DataError(f"data: {len(self.prompts)} prompts are fewer than data.rollout_batch_size={size}")
        if left:
            self.notices.append(f"{left} of {len(self.prompts)} prompts fill no RL step and are left out of each epoch")
        self.total_steps = bounded_steps(config, self.steps_per_epoch)

    def describe(self) -> str:
        """For the start of a run."""
        text = f"{len(self.prompts)} prompts, {self.steps_per_epoch} RL steps an epoch; {len(self.validation)} validate"
        return "\n".join([text, *(f"notice: {n}" for n in self.notices)])

    def identity(self) -> dict[str, int | str | bool]:
        """What decides which prompts RL step k has."""
        digest = 0
        for prompt in self.prompts:
            digest = zlib.crc32(prompt.ids.tobytes(), digest)
        data = self.config.data
        return {
            "prompts": len(self.prompts), "hash of the prompts": digest, "data.seed": data.seed,
            "data.shuffle": data.shuffle, "data.rollout_batch_size": data.rollout_batch_size or 1,
        }  # fmt: skip

    def step(self, step: int) -> list[Prompt]:
        """The prompts of an RL step (0-based)."""
        data, size = self.config.data, self.config.data.rollout_batch_size or 1
        epoch, place = divmod(step, self.steps_per_epoch)
        order = epoch_order(len(self.prompts), seed=data.seed, epoch=epoch, shuffle=data.shuffle)
        return [self.prompts[i] for i in order[place * size : (place + 1) * size]]

    def _read(self, paths: Sequence[str]) -> list[Prompt]:
        faults, found, dropped, first = Faults(), list[Prompt](), 0, ""
        for source in resolve_sources(paths, "tokens", faults):
            report = FieldReport()
            for line, record in read_records(source, faults):
                try:
                    prompt = self._prompt(object_of(record))
                except BadRecord as e:
                    faults.add(source.path, line, str(e))
                    continue
                if self.config.reward.function is None:  # one's own function is given the whole record
                    read = (self.config.data.prompt_key, self.config.data.answer_key)
                    report.unread(line, [n for n in record if n not in read and given(record, n)])
                if len(prompt.ids) <= self.longest:
                    found.append(prompt)
                elif self.config.data.filter_prompt_by_length:
                    dropped, first = dropped + 1, first or f"{source.path}:{line}"
                else:
                    text = f"a prompt of {len(prompt.ids)} tokens exceeds data.max_prompt_length={self.longest}"
                    faults.add(source.path, line, text)
            self.notices += [f"{source.path}: {text}" for text in report.notices()]
        faults.raise_if_any()
        if dropped:
            self.notices.append(
                f"{dropped} prompts exceed {self.longest} tokens and are left out, the first is {first}"
            )
        return found

    def _prompt(self, record: dict[str, Any]) -> Prompt:
        data = self.config.data
        value = record.get(data.prompt_key)
        turns = value if isinstance(value, list) else None
        if turns is None and not (isinstance(value, str) and value):
            raise BadRecord(f"no prompt under {data.prompt_key!r} (data.prompt_key); its keys: {keys_of(record)}")
        if self.config.reward.function is None:
            try:
                answers_of(record, data.answer_key)
            except DataError as e:
                raise BadRecord(str(e)) from None
        try:
            return Prompt(*self._encoded(turns, value), record)
        except (KeyError, TypeError, AttributeError) as e:
            raise BadRecord(f"turns must be objects with role and content ({type(e).__name__}: {e})") from None

    def _encoded(self, turns: list[dict[str, Any]] | None, text: Any) -> tuple[np.ndarray, str]:
        """Ids and text; one bos where the tokenizer has one, whoever wrote it."""
        tokenizer, asked = self.tokenizer, self.config.data.apply_chat_template
        if isinstance(tokenizer, ByteTokenizer):
            if turns is not None or asked:
                messages = turns or [{"role": "user", "content": text}]
                text = "".join(f"<|{m['role']}|>\n{m['content']}\n" for m in messages) + "<|assistant|>\n"
        elif turns is not None or (asked if asked is not None else tokenizer.template is not None):
            text = tokenizer.render(turns or [{"role": "user", "content": text}], add_generation_prompt=True)
        (ids,) = tokenizer.encode_batch([text])
        if tokenizer.bos_id is not None and (not len(ids) or ids[0] != tokenizer.bos_id):
            ids = np.concatenate([[tokenizer.bos_id], ids])
        if not len(ids):
            raise BadRecord("the prompt has no token")
        return ids.astype(np.int64), text


def response_length(config: RunConfig) -> int:
    """Most tokens of a response: sampling_params.max_new_tokens, else what the row leaves beside the prompt."""
    longest = config.algorithm.sampling_params.max_new_tokens
    return longest or (config.row_length or 0) - (config.data.max_prompt_length or 0)


def prompt_length(config: RunConfig) -> int:
    """Most tokens of a prompt."""
    return config.data.max_prompt_length or (config.row_length or 0) - response_length(config)


def _stop_ids(config: RunConfig, spec: ModelSpec, tokenizer: ByteTokenizer | FastTokenizer) -> tuple[int, ...]:
    """Ids that end a response: the YAML's, the folder's (generation_config.json names more than config.json), the
    tokenizer's."""
    found: list[Any] = [*config.algorithm.sampling_params.stop_token_ids, spec.eos_token_id, tokenizer.eos_id]
    file = Path(config.actor.model.model_path or "") / "generation_config.json"
    if file.is_file():
        found.append(json.loads(file.read_text(encoding="utf-8")).get("eos_token_id"))
    flat = [i for x in found for i in (x if isinstance(x, list) else [x])]
    return tuple(sorted({i for i in flat if isinstance(i, int) and 0 <= i < spec.vocab_size}))
