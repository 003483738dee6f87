"""Loading by slices: every tp rank's parameters are cuts of HF's tensors, and no rank reads more than its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hybrid5d.checkpoint import start_weights as hf
from hybrid5d.checkpoint.safetensors_writer import SafetensorsWriter
from hybrid5d.checkpoint.start_weights import load_hf_weights
from hybrid5d.context_parallel import ContextParallelAttention
from hybrid5d.errors import CheckpointError, ConfigErrors
from hybrid5d.hf.spec import ModelSpec, parse_hf_config
from hybrid5d.models.decoder import decoder_layers
from hybrid5d.parallel.agree import together
from hybrid5d.parallel.context import Axis, ParallelContext
from hybrid5d.parallel.shard import Piece, Shard, pieces_of
from hybrid5d.plan.cut import Cut
from hybrid5d.plan.layout import ParallelLayout
from hybrid5d.tensor_parallel import annotate
from tests.kit import MODELS, save_model

ONE = Axis.single()


def tp_context(tp: int, rank: int) -> ParallelContext:
    """A context for building layers; it cannot communicate."""
    axis = Axis(None, tp, rank, tuple(range(tp)))
    return ParallelContext(ParallelLayout(tp=tp), rank, axis, ONE, ONE, ONE, ONE, axis, ONE)


def build(spec: ModelSpec, tp: int, rank: int, keep: slice = slice(None)) -> nn.ModuleList:
    """Layers of one tp rank, `keep` = those of a pipeline stage; parameters filled with rubbish."""
    layers = decoder_layers(spec, tp_context(tp, rank), lambda: ContextParallelAttention(ONE))[keep]
    module = nn.ModuleList([layer.build() for layer in layers])
    for p in module.parameters():
        nn.init.constant_(p, 7.0)
    return module


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    return {name: save_model({**config, "num_hidden_layers": 2}, root / name) for name, config in MODELS.items()}


def spec_in(folder: Path) -> ModelSpec:
    return parse_hf_config(json.loads((folder / "config.json").read_text()))


def covered(param: nn.Parameter) -> torch.Tensor:
    """True where a piece lies."""
    mask = torch.zeros(param.shape, dtype=torch.bool)
    for piece in pieces_of(param):
        piece.local_view(mask).fill_(True)
    return mask


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_parameters_are_cuts_of_hf_tensors(folders: dict[str, Path], name: str, tp: int) -> None:
    full = load_file(folders[name] / "model.safetensors")
    for rank in range(tp):
        module = build(spec_in(folders[name]), tp, rank)
        load_hf_weights(module, folders[name], spec_in(folders[name]))
        for param in module.parameters():
            assert pieces_of(param)
            for piece in pieces_of(param):
                assert torch.equal(piece.local_view(param), piece.of(full[piece.name])), piece
            assert not param[~covered(param)].any(), "padding is not zero"


def test_sharded_folder_and_bf16_parameters(folders: dict[str, Path], tmp_path: Path) -> None:
    full = load_file(folders["qwen2"] / "model.safetensors")
    names = sorted(full)
    weight_map = {n: f"model-{i % 3}.safetensors" for i, n in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: full[n] for n in names if weight_map[n] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    module = build(spec_in(folders["qwen2"]), 2, 1).to(torch.bfloat16)
    load_hf_weights(module, tmp_path, spec_in(folders["qwen2"]))
    for param in module.parameters():
        for piece in pieces_of(param):
            assert torch.equal(piece.local_view(param), piece.of(full[piece.name]).to(torch.bfloat16))


def test_tied_head_stage_reads_the_embedding_under_either_name(folders: dict[str, Path], tmp_path: Path) -> None:
    spec, full = spec_in(folders["qwen3"]), load_file(folders["qwen3"] / "model.safetensors")
    table = full.pop("model.embed_tokens.weight")
    save_file({**full, "lm_head.weight": table}, tmp_path / "model.safetensors")
    for folder in (folders["qwen3"], tmp_path):
        last = build(spec, 2, 1, keep=slice(-2, None))  # norm and head
        load_hf_weights(last, folder, spec)
        head = last[1].weight
        (piece,) = pieces_of(head)
        assert piece.name == "model.embed_tokens.weight" and torch.equal(piece.local_view(head), piece.of(table))


def test_tied_model_whose_head_differs_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers does not tie such a model, whatever config.json says: its logits would be others than ours."""
    spec, full = spec_in(folders["qwen3"]), load_file(folders["qwen3"] / "model.safetensors")
    table = full["model.embed_tokens.weight"]
    save_file({**full, "lm_head.weight": table.clone()}, tmp_path / "model.safetensors")
    load_hf_weights(build(spec, 1, 0), tmp_path, spec)
    other = table.clone()
    other[-1, -1] += 1
    save_file({**full, "lm_head.weight": other}, tmp_path / "model.safetensors")
    for keep in (slice(0, 1), slice(-2, None)):  # the embedding's stage, the head's
        with pytest.raises(CheckpointError, match=r"lm_head\.weight differs.*Fix: .*tie_word_embeddings") as e:
            load_hf_weights(build(spec, 2, 1, keep=keep), tmp_path, spec)
        assert "\n" not in str(e.value)


class CountingOpen:
    """Stands in for safe_open: counts bytes that leave the file, and forbids whole-tensor reads."""

    total = 0

    def __init__(self, *args: Any, **kwargs: Any):
        self.inner = safetensors.safe_open(*args, **kwargs)

    def __enter__(self) -> CountingOpen:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.inner.__exit__(*exc)

    def get_slice(self, name: str) -> Any:
        outer, view = self, self.inner.get_slice(name)

        class View:
            def __getitem__(self, box: Any) -> torch.Tensor:
                part = view[box]
                CountingOpen.total += part.numel() * part.element_size()
                assert outer is not None
                return part

        return View()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_rank_reads_its_slices_alone(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tp: int) -> None:
    monkeypatch.setattr(hf, "safe_open", CountingOpen)
    folder = folders["llama"]
    spec, whole = spec_in(folder), (folder / "model.safetensors").stat().st_size
    read = []
    for rank in range(tp):
        CountingOpen.total = 0
        module = build(spec, tp, rank)
        report = load_hf_weights(module, folder, spec)
        pieces = [p for q in module.parameters() for p in pieces_of(q)]
        mine = sum(4 * p.of(torch.empty(p.full_shape)).numel() for p in pieces)
        assert report.bytes_read == CountingOpen.total == mine
        read.append(report.bytes_read)
    # norms are whole on every rank, kv heads on two of four
    assert max(read) <= whole / tp * (1.0 if tp == 1 else 1.1)
    stage = load_hf_weights(build(spec, 1, 0, keep=slice(0, 2)), folder, spec)
    assert stage.bytes_read < 0.55 * whole


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(folders: dict[str, Path], tmp_path: Path, bad: float) -> None:
    full = load_file(folders["llama"] / "model.safetensors")
    full["model.layers.1.mlp.up_proj.weight"][40, 3] = bad
    full["model.norm.weight"][2] = bad
    save_file(full, tmp_path / "model.safetensors")
    spec = spec_in(folders["llama"])
    with pytest.raises(CheckpointError) as caught:
        load_hf_weights(build(spec, 2, 1), tmp_path, spec)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert "up_proj.weight holds NaN or infinite values" in lines[0] and "model.norm.weight" in lines[1]


def test_faults_are_found_before_any_data_is_read(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr(hf, "safe_open", refuse)
    wrong = parse_hf_config({**MODELS["llama"], "num_hidden_layers": 3, "vocab_size": 99})
    with pytest.raises(ConfigErrors) as caught:
        load_hf_weights(build(wrong, 1, 0), folders["llama"], wrong)
    text = str(caught.value)
    assert "9 tensors are missing" in text and text.count("has shape [101, 32] but config.json gives [99, 32]") == 2


def test_a_parameter_of_ones_own_with_several_pieces(folders: dict[str, Path]) -> None:
    """Pieces may leave holes anywhere; holes are zero, and parameters without pieces are left alone."""
    full = load_file(folders["llama"] / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    module = nn.Module()
    module.mixed = nn.Parameter(torch.full((10, 32), 7.0))
    pieces = (Piece(name, (64, 32), Cut(0, 5, 8), 1), Piece(name, (64, 32), Cut(0, 60, 63), 6))
    annotate(module.mixed, Shard(pieces, Axis.single()))
    module.free = nn.Parameter(torch.full((3,), 7.0))
    load_hf_weights(module, folders["llama"], spec_in(folders["llama"]))
    want = torch.zeros(10, 32)
    want[1:4], want[6:9] = full[name][5:8], full[name][60:63]
    assert torch.equal(module.mixed, want) and bool((module.free == 7).all())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_full_disk_is_named(size: int) -> None:
    """The system's error of a write has no path; small files fail only when they are flushed."""

    def write() -> None:
        with SafetensorsWriter(Path("/dev/full"), {"a": (torch.float32, (size,))}) as writer:
            writer.write("a", torch.zeros(size))

    with pytest.raises(CheckpointError, match=r"^/dev/full: No space left on device$"):
        together(ONE, write)
