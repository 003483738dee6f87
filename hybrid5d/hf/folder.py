"""What a Hugging Face model folder must hold, checked from file headers alone. Pure: no torch, no transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from safetensors import SafetensorError, safe_open

from hybrid5d.errors import ConfigError
from hybrid5d.hf.spec import ModelSpec

KEY = "actor.model.model_path"
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VALUE_HEAD = "score.weight"  # transformers' name in classifiers of one label
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
FUSED = ("qkv_proj", "Wqkv", "query_key_value", "c_attn", "gate_up_proj", "Wi", "w12")
QUANTISED = ("qweight", "qzeros", "weight_scale", "weight_scale_inv", "absmax", "quant_map", "g_idx")
_ENDS = 1 << 20  # bytes of a file's beginning and end that tell it from another
SHOWN = 3  # names listed in a message before "and N more"
HEAD_DIFFERS = f"{HEAD} differs from {EMBEDDING}, though config.json ties them"
UNTIE = "set tie_word_embeddings=false in config.json"
TO_SAFETENSORS = (
    'convert once with python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('SRC').save_pretrained('DST')\""
)


class HeaderError(ValueError):
    """A file that is not a valid safetensors file; the text is one line that names it."""


@dataclass(frozen=True)
class TensorHeader:
    """What a file's header says of a tensor; `dtype` under the format's name (F32, BF16, ...)."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of a safetensors file, checked against the file's size; no data is read.

    Raises:
        HeaderError: unreadable, empty, truncated or malformed.
    """
    try:
        with path.open("rb"), safe_open(path, "np") as file:  # open first: its OSErrors say what the system says
            slices = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118  no mapping
            return {name: TensorHeader(part.get_dtype(), tuple(part.get_shape())) for name, part in slices}
    except OSError as exc:
        raise HeaderError(f"{path} cannot be read: {exc.strerror or exc}") from None
    except SafetensorError as exc:
        first = str(exc).splitlines()[0]
        raise HeaderError(f"{path} is truncated or not a safetensors file: {first}") from None


@dataclass(frozen=True)
class HfWeights:
    """Where each tensor of a folder is. `tensors[name]` = (file, header entry); `tied`: head and embedding are one."""

    folder: Path
    tensors: Mapping[str, tuple[Path, TensorHeader]] = field(default_factory=dict)
    tied: bool = False

    def source(self, name: str) -> str:
        """The stored name of a model tensor: tied weights may be stored under either of their two names."""
        other = {EMBEDDING: HEAD, HEAD: EMBEDDING}.get(name, name)
        return name if name in self.tensors or other not in self.tensors else other


def has_safetensors(folder: str | Path) -> bool:
    """True where the folder holds weights we can read (one file, or shards with their index)."""
    try:
        return any((Path(folder) / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))
    except OSError:
        return False


def weights_fingerprint(folder: str | Path) -> str:
    """Which weights a folder holds: names, sizes, first and last MiB of its safetensors files; "" where it has none.

    Raises:
        OSError: a file cannot be read.
    """
    digest, files = hashlib.blake2b(digest_size=16), sorted(Path(folder).glob("*.safetensors"))
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            digest.update(file.read(_ENDS))
            file.seek(max(size - _ENDS, 0))
            digest.update(file.read(_ENDS))
    return digest.hexdigest() if files else ""


def weights_wanted(load_weights: bool | None, folder: str | Path | None) -> bool:
    """Whether a run starts from the folder's weights: as the YAML says; where it does not, if there are any.

    Weights that we refuse (pickles, shards without an index) count: a run must not start at random beside them.
    """
    if load_weights is not None or folder is None:
        return bool(load_weights)
    try:
        names = [p.name for p in Path(folder).iterdir()]
    except OSError:
        return False
    pickles = [n for n in names if n.startswith(("pytorch_model", "consolidated")) and n.endswith((".bin", ".pth"))]
    return INDEX_FILE in names or bool(pickles) or any(n.endswith(".safetensors") for n in names)


def _some(names: Iterable[str]) -> str:
    names = list(names)
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _no_weights(folder: Path) -> ConfigError:
    try:
        result = sorted(p.name for p in folder.iterdir())
    except OSError as exc:
        return ConfigError(
            KEY, str(folder), f"the folder cannot be read: {exc.strerror}", "check the path and its permissions"
        )
    if any(n.endswith((".bin", ".pt", ".pth", ".ckpt")) for n in result):
        rule = "holds pickled weights only; they can run code when they are read, so they are refused"
        return ConfigError(KEY, str(folder), rule, TO_SAFETENSORS)
    if loose := [n for n in result if n.endswith(".safetensors")]:
        rule = f"holds {_some(loose)} but neither {SINGLE_FILE} nor {INDEX_FILE}"
        return ConfigError(KEY, str(folder), rule, "download the folder again, with its index")
    rule = f"holds neither {SINGLE_FILE} nor {INDEX_FILE}"
    return ConfigError(KEY, str(folder), rule, "set actor.model.load_weights=false to train from the seed")


def _index_files(folder: Path) -> tuple[dict[str, str], list[ConfigError]]:
    """The index's map from tensor to file, and what is wrong with it."""
    path = folder / INDEX_FILE
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        mapped = {str(k): str(v) for k, v in weight_map.items()}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "no JSON object with a weight_map"
        return {}, [ConfigError(KEY, str(folder), f"{path} cannot be read: {reason}", "download the index again")]
    if outside := sorted({f for f in mapped.values() if Path(f).name != f}):
        return {}, [
            ConfigError(
                KEY, str(folder), f"{path} names files outside the folder: {_some(outside)}", "repair the index"
            )
        ]
    missing = sorted({f for f in mapped.values() if not (folder / f).exists()})
    if missing:
        rule = f"{INDEX_FILE} lists {len(missing)} shards that are not there: {_some(missing)}"
        return mapped, [ConfigError(KEY, str(folder), rule, "download the missing files")]
    return mapped, []


def read_hf_folder(folder: str | Path) -> tuple[HfWeights, list[ConfigError]]:
    """Where the tensors of a folder are, and the faults of its files; file headers only are read."""
    folder = Path(folder)
    if not has_safetensors(folder):
        return HfWeights(folder), [_no_weights(folder)]
    weight_map: dict[str, str] = {}
    errors: list[ConfigError] = []
    if (folder / SINGLE_FILE).is_file():
        files = [SINGLE_FILE]
    else:
        weight_map, errors = _index_files(folder)
        files = sorted({f for f in weight_map.values() if (folder / f).exists()})
    tensors: dict[str, tuple[Path, TensorHeader]] = {}
    for name in files:
        try:
            path = folder / name
            tensors.update({n: (path, h) for n, h in read_header(path).items()})
        except HeaderError as exc:
            errors.append(ConfigError(KEY, str(folder), str(exc), "download or save the file again"))
    if not errors:
        absent = sorted(n for n in weight_map if n not in tensors and n != HEAD)
        if absent:
            rule = f"{INDEX_FILE} lists {len(absent)} tensors that no file holds: {_some(absent)}"
            errors.append(ConfigError(KEY, str(folder), rule, "download the index and the files again"))
    return HfWeights(folder, tensors), errors


def _unexpected(names: list[str], expected: Mapping[str, tuple[int, ...]]) -> list[tuple[str, str]]:
    """(rule, fix) for tensors the model does not have."""
    parts = {n: n.split(".") for n in names}
    fused = [n for n in names if any(p in FUSED for p in parts[n])]
    quantised = [n for n in names if parts[n][-1] in QUANTISED and n not in fused]
    other = [n for n in names if n not in fused and n not in quantised]
    result = []
    if fused:
        rule = f"{len(fused)} tensors are fused, which we do not take apart: {_some(fused)}"
        fix = "save the model in Hugging Face's own form with separate q, k, v, gate and up projections"
        result.append((rule, fix))
    if quantised:
        result.append(
            (
                f"{len(quantised)} tensors are parts of quantised weights: {_some(quantised)}",
                "dequantise the model first",
            )
        )
    if other:
        close = get_close_matches(other[0], expected, 1)
        fix = f"the model calls a tensor {close[0]}" if close else "give a folder of a plain causal language model"
        result.append((f"{len(other)} tensors are not this model's: {_some(other)}", fix))
    return result


def _check_tensor(name: str, header: TensorHeader, shape: tuple[int, ...]) -> tuple[str, str] | None:
    if header.shape != shape:
        return (
            f"{name} has shape {list(header.shape)} but config.json gives {list(shape)}",
            "use weights and config.json of one model",
        )
    if header.dtype not in FLOAT_DTYPES:
        return f"{name} has dtype {header.dtype}; floating-point weights are needed", "dequantise the model first"
    return None


def check_tensors(weights: HfWeights, expected: Mapping[str, tuple[int, ...]], tied: bool) -> list[ConfigError]:
    """Compare names, shapes and dtypes with what the model needs."""
    errors = []

    def refuse(rule: str, fix: str) -> None:
        errors.append(ConfigError(KEY, str(weights.folder), rule, fix))

    if VALUE_HEAD in expected and VALUE_HEAD not in weights.tensors:  # a critic starts with a fresh one
        expected = {n: shape for n, shape in expected.items() if n != VALUE_HEAD}
    # Only a tied model may find its one matrix under the other name.
    stored = {n: weights.source(n) if tied else n for n in expected}
    missing = [n for n, s in stored.items() if s not in weights.tensors]
    ignorable = {HEAD} if tied or HEAD not in expected else set()
    unexpected = sorted(set(weights.tensors) - set(stored.values()) - ignorable)
    unexpected = [n for n in unexpected if not n.endswith("rotary_emb.inv_freq")]  # a buffer old Llama folders carry
    for rule, fix in _unexpected(unexpected, expected):
        refuse(rule, fix)
    if missing == [HEAD]:
        refuse(f"{HEAD} is missing", "set tie_word_embeddings=true in config.json if the head shares the embedding")
    elif missing:
        refuse(f"{len(missing)} tensors are missing: {_some(missing)}", "download the folder again")
    if tied and {EMBEDDING, HEAD} <= set(weights.tensors):
        shapes = [list(weights.tensors[n][1].shape) for n in (EMBEDDING, HEAD)]
        if shapes[0] != shapes[1]:
            refuse(f"{HEAD_DIFFERS}: shapes {shapes[1]} and {shapes[0]}", UNTIE)
    present = {n: weights.tensors[s][1] for n, s in stored.items() if s in weights.tensors}
    faults = [f for n, header in present.items() if (f := _check_tensor(n, header, expected[n]))]
    for rule, fix in faults[: 2 * SHOWN]:
        refuse(rule, fix)
    if len(faults) > 2 * SHOWN:
        refuse(
            f"{len(faults) - 2 * SHOWN} more tensors do not fit config.json", "use weights and config.json of one model"
        )
    return errors


def inspect_hf_folder(
    folder: str | Path, spec: ModelSpec, expected: Mapping[str, tuple[int, ...]]
) -> tuple[HfWeights, list[ConfigError]]:
    """Where a folder's tensors are, and everything that keeps them from being loaded into the model ([] = sound).

    Headers only are read. `expected`: name -> shape of each tensor of the model (`plan.tensors.shapes`).
    """
    if spec.raw.get("quantization_config"):
        declared = spec.raw["quantization_config"]
        method = declared.get("quant_method") if isinstance(declared, dict) else declared
        rule = f"config.json declares quantised weights ({method})"
        fix = "dequantise the model and save it without quantization_config"
        return HfWeights(Path(folder)), [ConfigError(KEY, str(folder), rule, fix)]
    weights, errors = read_hf_folder(folder)
    weights = replace(weights, tied=spec.tied)
    return weights, errors or check_tensors(weights, expected, spec.tie_word_embeddings)
