"""docs/migration.md: every name of ours exists, every refusal and substitute is the real one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from hybrid5d.config.schema import schema_keys
from hybrid5d.errors import ConfigErrors
from hybrid5d.load import load_config
from hybrid5d.plan.deepspeed_keys import FORBIDDEN, SECTIONS, TOP_LEVEL
from hybrid5d.plan.run import build_plan
from hybrid5d.rlinf.keys import FOREIGN, MUST_BE_OFF
from tests.cli_kit import hybrid5d

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "migration.md").read_text(encoding="utf-8")
KEYS = schema_keys()
BLOCKS = {key.split(".")[0] for key in KEYS} - {"hybrid5d"}


def section(name: str) -> str:
    return re.split(r"^## ", PAGE.partition(f"\n## {name}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def rows(name: str, table: int = 0) -> list[list[str]]:
    """The cells of a section's table."""
    blocks = re.findall(r"(?:^\|.*\n)+", section(name), re.MULTILINE)
    return [[c.strip() for c in line.strip("|").split("|")] for line in blocks[table].splitlines()[2:]]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_keys_of_ours_are_in_the_schema() -> None:
    named = {word for word in code(PAGE) if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", word)}
    ours = {word for word in named if word.split(".")[0] in BLOCKS}
    assert len(ours) > 50
    for key in ours:
        assert key in KEYS or any(k.startswith(f"{key}.") for k in KEYS), key


def test_megatron_flags_have_the_names_of_keys() -> None:
    """Where the spelling is another one (`--train-iters`), the key of this name must not exist or be another's."""
    leaves = {key.rpartition(".")[2] for key in KEYS}
    for flags, ours, _ in rows("Megatron-LM"):
        for flag, key in zip(code(flags), code(ours), strict=False):
            name = flag.removeprefix("--").replace("-", "_")
            assert key.rpartition(".")[2] == name or name not in leaves or name in ("fp16", "bf16", "min_lr"), flag
    listed = {key.rpartition(".")[2] for row in rows("Megatron-LM") for key in code(row[1])}
    shared = {k.rpartition(".")[2] for k in KEYS if k.startswith(("actor.lr_sched.", "actor.optim."))}
    rare = {"optimizer_cpu_offload", "optimizer_offload_fraction", "fp16", "bf16"}
    assert shared - listed <= rare, shared - listed - rare


def test_what_is_called_refused_or_dropped_is() -> None:
    text = section("Megatron-LM")
    refused = code(text.partition("Refused by name")[2].partition("Dropped")[0].partition("):")[2])
    dropped = code(text.partition("Dropped, since")[2].partition(";")[0])
    assert len(refused) > 5 and len(dropped) > 4
    for name in refused:
        keys = {f"actor.model.{name}", f"actor.megatron.{name}"}
        assert keys & set(MUST_BE_OFF) or name == "expert_model_parallel_size", name
    for name in dropped:
        assert {f"actor.model.{name}", f"actor.megatron.{name}"} & set(FOREIGN), name


def test_accelerates_names_are_its_own() -> None:
    config = pytest.importorskip("accelerate.parallelism_config").ParallelismConfig
    plugin = pytest.importorskip("accelerate.utils").DeepSpeedPlugin
    fields = {c.__name__: {f.name for f in dataclasses.fields(c)} for c in (config, plugin)}
    for cell, *_ in rows("accelerate"):
        (name,) = code(cell)
        owner, _, attribute = name.partition(".")
        assert attribute in fields[owner], name
    sizes = {f for f in fields["ParallelismConfig"] if f.endswith("_size")}
    assert sizes == {code(c)[0].partition(".")[2] for c, *_ in rows("accelerate") if "Parallelism" in c}


def test_methods_and_verbs_exist() -> None:
    import hybrid5d as package

    for owner, name in re.findall(r"`(Engine|StepResult)\.(\w+)", PAGE):
        known = getattr(package, owner)
        fields = {f.name for f in dataclasses.fields(known)} if dataclasses.is_dataclass(known) else set()
        assert hasattr(known, name) or name in fields or name == "ds", name
    verbs = hybrid5d("--help").stdout
    for verb in set(re.findall(r"`hybrid5d (\w+)", PAGE)):
        assert re.search(rf"^\W*{verb}\b", verbs, re.MULTILINE), verb


def test_deepspeeds_keys_are_refused_with_the_key_that_the_page_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    pages = {code(theirs)[0]: code(ours)[0] for theirs, ours in rows("DeepSpeed")}
    for theirs, ours in pages.items():
        top, _, rest = theirs.partition(".")
        assert top in TOP_LEVEL and (not rest or rest.split(".")[0] in SECTIONS[top])
        if theirs in ("train_micro_batch_size_per_gpu", "gradient_clipping"):
            continue  # refused only where the value differs
        key = (
            theirs
            if rest or top in ("train_batch_size", "gradient_accumulation_steps", "sequence_parallel_size")
            else f"{top}.enabled"
        )
        with pytest.raises(ConfigErrors) as refused:
            build_plan(load_config("examples/quickstart.yaml", [f"++actor.deepspeed.{key}=1"]), 8)
        assert any(ours in e.fix for e in refused.value.errors), theirs
    forbidden = {k: v for k, v in FORBIDDEN.items() if v and k not in ("optimizer", "data_types.param_dtype")}
    assert forbidden.items() <= pages.items()
