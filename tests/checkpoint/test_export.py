"""HF folders out of engines and checkpoints: transformers loads them with no key missing or left over, logits equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from hybrid5d.checkpoint.export import export_checkpoint
from hybrid5d.errors import CheckpointError, ConfigErrors
from tests.cli_kit import Done, hybrid5d
from tests.engine_kit import Layout, build_engine
from tests.harness import run_ranks
from tests.kit import MODELS, Recipe, hf_model, make_rows, reference, save_model, step_batch

ADAM = Recipe("adam", lr=1e-3, clip=0.5, weight_decay=0.1, eps=1e-6, steps=2)
STEPS = [make_rows(8, 20, 101, seed) for seed in range(2)]
CARRIED = {
    "generation_config.json": '{"eos_token_id": 3}',
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": '{"x": 1}',
    "chat_template.jinja": "{{ messages }}",
    "merges.txt": "a b",
}
LEFT = {"README.md": "x", "modeling_own.py": "x", "training_args.bin": "x", "optimizer.pt": "x"}


def source_folder(name: str, folder: Path) -> Path:
    """A model folder with tokenizer files beside the weights, and things that must not be carried over."""
    save_model(MODELS[name], folder)
    for file, text in {**CARRIED, **LEFT}.items():
        (folder / file).write_text(text)
    return folder


def _train(rank: int, layout: Layout, folder: str, save: str, exports: dict[str, dict[str, Any]]) -> None:
    engine = build_engine(layout, ADAM, folder, len(STEPS[0]))
    for rows in STEPS:
        engine.train_batch(step_batch(rows, layout.dp, engine.ctx.dp.rank, layout.micro))
    engine.save_checkpoint(save)
    for target, options in exports.items():
        engine.export_hf(target, **options)


def train(layout: Layout, folder: Path, save: Path, exports: dict[Path, dict[str, Any]] | None = None) -> None:
    """Two steps, a checkpoint, live exports."""
    texts = {str(k): v for k, v in (exports or {}).items()}
    run_ranks(layout.world, _train, layout, str(folder), str(save), texts, timeout=150)


def load_strict(folder: Path) -> Any:
    """transformers' model; fails where a key is missing, left over or of another shape."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, attn_implementation="sdpa")
    found = {k: v for k, v in info.items() if v}
    assert not found, found
    return model.eval()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors by name, through the index where there is one; every entry of it must exist."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        files = {None: "model.safetensors"}
    else:
        files = json.loads(index.read_text())["weight_map"]
        assert {p.name for p in folder.glob("*.safetensors")} == set(files.values())
    found = {}
    for file in set(files.values()):
        with safe_open(folder / file, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118
                assert None in files or files[name] == file
                found[name] = f.get_tensor(name)
    assert None in files or set(found) == set(files)
    return found


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(24).reshape(2, 12) % 101
    with torch.no_grad():
        return model(ids).logits


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tied Qwen3 from a sharded folder whose index lists a head, trained at tp2 pp2; a checkpoint and a live export."""
    root = tmp_path_factory.mktemp("tied")
    source = source_folder("qwen3", root / "source")
    hf_model(MODELS["qwen3"]).save_pretrained(source, max_shard_size="40KB")
    (source / "model.safetensors").unlink()
    (source / "generation_config.json").write_text(CARRIED["generation_config.json"])
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    train(Layout(tp=2, pp=2, sp=True), source, root / "ckpt", {root / "live": {}})
    return {"source": source, "ckpt": root / "ckpt", "live": root / "live"}


def test_tied_model(tied: dict[str, Path], tmp_path: Path) -> None:
    """No head of its own, tie flag kept, live export and checkpoint export the same, equal to the HF loop."""
    out = export_checkpoint(tied["ckpt"], tmp_path / "out")
    model = load_strict(out)
    assert "lm_head.weight" not in stored(out)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    live = stored(tied["live"])
    for name, tensor in stored(out).items():
        assert torch.equal(tensor, live[name]), name
    want = hf_model(MODELS["qwen3"])
    reference(want, STEPS, ADAM)
    assert torch.allclose(logits(model), logits(want), atol=1e-5)


def test_tokenizer_and_template_are_carried_over_and_nothing_else(tied: dict[str, Path], tmp_path: Path) -> None:
    for out in (export_checkpoint(tied["ckpt"], tmp_path / "out"), tied["live"]):
        assert {p.name for p in out.iterdir()} == {*CARRIED, "config.json", "model.safetensors"}
        for file, text in CARRIED.items():
            assert (out / file).read_text() == text
    assert {p.name for p in tied["live"].parent.iterdir()} == {"source", "ckpt", "live"}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", Layout(tp=4)),
        ("llama_bias", Layout(tp=2, dp=2)),
        ("qwen2", Layout(pp=2, cp=2)),
        ("mistral", Layout(dp=2, zero=3)),
        ("qwen3", Layout(tp=4, dp=2, zero=2)),
    ],
    ids=str,
)
def test_every_family(tmp_path: Path, name: str, layout: Layout) -> None:
    """Untied heads stay, the padded vocabulary is trimmed (101 over tp 4), biases and q/k norms are there."""
    source = source_folder(name, tmp_path / "source")
    train(layout, source, tmp_path / "ckpt", {tmp_path / "live": {"max_shard_size": "20KB"}})
    out = export_checkpoint(tmp_path / "ckpt", tmp_path / "out", max_shard_size="20KB")
    assert len(list(out.glob("*.safetensors"))) > 2
    want = hf_model(MODELS[name])
    reference(want, STEPS, ADAM)
    for folder in (out, tmp_path / "live"):
        assert torch.allclose(logits(load_strict(folder)), logits(want), atol=2e-5)
        assert stored(folder)["model.embed_tokens.weight"].shape == (101, 32)
        assert ("lm_head.weight" in stored(folder)) is not MODELS[name]["tie_word_embeddings"]


NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def test_dtypes_of_a_bf16_run(tmp_path: Path) -> None:
    """All floats in the asked dtype, config agrees; bf16 = rounded fp32 masters."""
    source = source_folder("qwen2", tmp_path / "source")
    exports = {tmp_path / f"live-{d}": {"dtype": d} for d in ("bf16", "fp32", "same")}
    train(Layout(tp=2, dp=2, precision="bf16"), source, tmp_path / "ckpt", exports)
    masters = stored(export_checkpoint(tmp_path / "ckpt", tmp_path / "out-fp32", "fp32"))
    assert any((t != t.bfloat16().float()).any() for t in masters.values()), "masters are no more than bf16"
    for asked, real in (("bf16", "bf16"), ("fp32", "fp32"), ("same", "bf16"), ("fp16", "fp16")):
        out = export_checkpoint(tmp_path / "ckpt", tmp_path / f"out-{asked}", asked, force=True)
        for folder in (out, tmp_path / f"live-{asked}"):
            if not folder.exists():
                continue
            config = json.loads((folder / "config.json").read_text())
            assert {config[k] for k in ("dtype", "torch_dtype") if k in config} == {str(NAMES[real]).split(".")[1]}
            for name, tensor in stored(folder).items():
                assert tensor.dtype == NAMES[real] and torch.equal(tensor, masters[name].to(NAMES[real])), name


def test_export_and_load_again_is_the_identity(tied: dict[str, Path], tmp_path: Path) -> None:
    """What was exported starts the next run: the first loss is the exported model's."""
    out = export_checkpoint(tied["ckpt"], tmp_path / "out")
    train(Layout(tp=2), out, tmp_path / "again", {})
    second = export_checkpoint(tmp_path / "again", tmp_path / "out2")
    want = load_strict(out)
    reference(want, STEPS, ADAM)
    assert torch.allclose(logits(load_strict(second)), logits(want), atol=1e-5)


# --- the command ----------------------------------------------------------------------------------------------------


def command(*args: Any) -> Done:
    return hybrid5d("export", *args)


def test_command_writes_and_refuses(tied: dict[str, Path], tmp_path: Path) -> None:
    done = command(tied["ckpt"], "--out", tmp_path / "out", "--dtype", "bf16")
    assert done.returncode == 0 and "step 2" in done.stdout, done.stderr
    assert load_strict(tmp_path / "out").dtype == torch.bfloat16
    again = command(tied["ckpt"], "--out", tmp_path / "out")
    assert (
        again.returncode == 2
        and again.stderr.strip() == f"{tmp_path / 'out'} exists; give another folder, or --force to replace it"
    )
    forced = command(tied["ckpt"] / "global_step_2", "--out", tmp_path / "out", "--force")
    assert forced.returncode == 0 and load_strict(tmp_path / "out").dtype == torch.float32
    assert {p.name for p in tmp_path.iterdir()} == {"out"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int8"}, "dtype='int8': is none of fp32, bf16, fp16, same"),
        ({"max_shard_size": "five"}, "max_shard_size='five': is no size"),
        ({"max_shard_size": "0GB"}, "is no size"),
    ],
)
def test_bad_options(tied: dict[str, Path], tmp_path: Path, options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigErrors, match=words.replace("(", r"\(")):
        export_checkpoint(tied["ckpt"], tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_damage_leaves_nothing_behind(tied: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    shutil.copytree(tied["ckpt"], tmp_path / "c")
    file = tmp_path / "c" / "global_step_2" / "actor" / "model-pp01-tp01.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model-pp01-tp01.safetensors is damaged"):
        export_checkpoint(tmp_path / "c", tmp_path / "out")
    file.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        export_checkpoint(tmp_path / "c", tmp_path / "out")
    with pytest.raises(CheckpointError, match="does not exist"):
        export_checkpoint(tmp_path / "nowhere", tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"c"}


def test_a_folder_that_is_no_model_is_never_replaced(tied: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(CheckpointError, match="something other than a model"):
        export_checkpoint(tied["ckpt"], tmp_path, force=True)
    assert (tmp_path / "thesis.txt").is_file()
    with pytest.raises(CheckpointError, match="is no folder"):
        export_checkpoint(tied["ckpt"], tmp_path / "thesis.txt", force=True)


def test_the_working_folder_may_be_replaced(
    tied: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m" / "sub").mkdir(parents=True)
    (tmp_path / "m" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "m")
    export_checkpoint(tied["ckpt"], ".", force=True)
    assert (tmp_path / "m" / "model.safetensors").is_file()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m" / "sub").mkdir()
    export_checkpoint(tied["ckpt"], "m/sub/..", force=True)
    assert {p.name for p in tmp_path.iterdir()} == {"m"} and not (tmp_path / "m" / "sub").exists()


def test_export_needs_no_optimizer_files(tied: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    shutil.copytree(tied["ckpt"], tmp_path / "c")
    for file in (tmp_path / "c" / "global_step_2" / "actor").glob("optim-*"):
        file.unlink()
    got = stored(export_checkpoint(tmp_path / "c", tmp_path / "out"))
    assert all(np.array_equal(t, stored(tied["live"])[n]) for n, t in got.items())
