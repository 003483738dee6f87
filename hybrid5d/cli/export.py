"""`hybrid5d export CHECKPOINT --out DIR`: a training checkpoint of any layout becomes a Hugging Face folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hybrid5d.checkpoint.manifest import find_checkpoint, read_manifest
from hybrid5d.cli.options import refuse
from hybrid5d.errors import HybridError


def export(
    checkpoint: Annotated[Path, typer.Argument(help="global_step_N folder, or a checkpoints folder (its newest)")],
    out: Annotated[Path, typer.Option(help="Hugging Face folder to write")],
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or same (the run's precision)")] = "same",
    max_shard_size: Annotated[str, typer.Option(help="largest weight file: 5GB, 200MB, 2GiB")] = "5GB",
    force: Annotated[bool, typer.Option("--force", help="replace an existing model folder")] = False,
) -> None:
    """Write weights, config.json, tokenizer and chat template for transformers and vLLM. One CPU process, no job."""
    try:
        manifest = read_manifest(find_checkpoint(checkpoint))  # refused before torch is imported

        from hybrid5d.checkpoint.export import export_checkpoint

        target = export_checkpoint(checkpoint, out, dtype, max_shard_size, force)
    except HybridError as exc:
        refuse(str(exc))
    sys.stdout.write(f"{target}: step {manifest.step}, {len(manifest.tensors)} tensors\n")


def main() -> None:
    """`python -m hybrid5d.cli.export`."""
    typer.run(export)


if __name__ == "__main__":
    main()
