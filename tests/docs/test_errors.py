"""docs/errors.md holds every message of the sources, and what a start prints stands on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybrid5d.errors import ConfigErrors
from hybrid5d.load import load_config
from hybrid5d.plan.run import build_plan
from tests.docs.errors import PAGE, page
from tests.docs.messages import messages

REPO = PAGE.parents[1]
PLANTED = """
from hybrid5d.errors import ConfigError, DataError

WIDTH = "a width"

def rule(draft):
    rule = f"needs {draft.count} of {WIDTH}"
    if draft.small:
        rule = "is too small"
    return [ConfigError("planted.key", 1, rule, "use " + ("more" if draft.small else "less"))]

def kinds(draft):
    yield "first of two rules"
    if draft.small:
        yield f"second of two rules, {draft.count}"

def listed(draft):
    return [ConfigError("planted.list", None, text) for text in kinds(draft)]

def check(draft, errors):
    def refuse(key, rule, fix="repair it"):
        errors.append(ConfigError(key, None, rule, fix))
    refuse("planted.closure", "said through a closure")
    refuse("planted.closure", "said with a fix of its own", "mend it")

def pairs(names):
    for name in names:
        yield f"{name} does not belong", f"drop {name}"

def looped(names, errors):
    for rule, fix in pairs(names):
        errors.append(ConfigError("planted.pairs", None, rule, fix))

class Odd(DataError):
    pass

def data(faults, path, notices):
    faults.add(path, 3, "a planted fault of a line")
    notices.append("a planted notice")
    raise Odd(f"{path}: a planted class of error")
"""


WRITTEN = """
from hybrid5d.cli.options import refuse

def verb(out, console):
    refuse(f"--out {out}: is planted. Fix: leave it")
    console.say("a line of progress")
    console.say(f"notice: planted after step {out.step}")
"""


def test_the_page_holds_what_the_sources_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run make errors-doc"


def test_messages_are_found_however_they_are_made(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "options.py").write_text("def refuse(line: str) -> None: ...")
    (tmp_path / "cli" / "verb.py").write_text(WRITTEN)
    found = {(m.kind, m.key, m.text, m.fix) for m in messages(tmp_path)}
    assert found == {
        ("ConfigError", "planted.key", "needs {count} of a width", "use more / use less"),
        ("ConfigError", "planted.key", "is too small", "use more / use less"),
        ("ConfigError", "planted.list", "first of two rules", ""),
        ("ConfigError", "planted.list", "second of two rules, {count}", ""),
        ("ConfigError", "planted.closure", "said through a closure", "repair it"),
        ("ConfigError", "planted.closure", "said with a fix of its own", "mend it"),
        ("ConfigError", "planted.pairs", "{name} does not belong", "drop {name}"),
        ("DataError", "", "a planted fault of a line", ""),
        ("notice", "", "a planted notice", ""),
        ("notice", "", "planted after step {step}", ""),
        ("refused", "", "--out {out}: is planted. Fix: leave it", ""),
        ("Odd", "", "{path}: a planted class of error", ""),
    }


WRONG = [
    ["actor.model.tensor_model_parallel_size=3"],
    ["actor.model.tensor_model_parallel_size=1"],
    ["actor.model.pipeline_model_parallel_size=8"],
    ["actor.model.pipeline_schedule=interleaved"],
    ["actor.model.pipeline_schedule=zbv", "actor.model.pipeline_partition=cost", "actor.model.pipeline_warmup=wide"],
    ["actor.model.decoder_first_pipeline_num_layers=9"],
    ["actor.model.cp_comm_type=a2a", "actor.model.context_parallel_size=8"],
    ["actor.model.hierarchical_context_parallel_sizes=[2,2]"],
    ["actor.model.recompute_granularity=full"],
    ["actor.model.recompute_granularity=selective", "actor.model.recompute_num_layers=1"],
    ["actor.model.model_path=/nowhere"],
    ["actor.global_batch_size=7", "actor.micro_batch_size=2"],
    ["actor.lr_sched.lr_warmup_iters=10000", "actor.lr_sched.min_lr=1"],
    ["actor.lr_sched.lr_decay_style=WSD"],
    ["++actor.deepspeed.zero_optimization.stage=3"],
    ["++actor.deepspeed.train_batch_size=8"],
    ["++actor.deepspeed.no_such_key=8"],
    ["+actor.model.no_such_key=1"],
    ["actor.model.no_such_key=1"],
    ["~actor.model.no_such_key"],
    ["+actor.model.fp8=e4m3"],
    ["+actor.optim.fp16=true", "actor.model.precision=bf16"],
    ["data.type=rollouts"],
    ["data.train_data_paths=/nowhere.txt"],
    ["runner.logger.logger_backends=[nobody]"],
    ["runner.resume_dir=/nowhere"],
    ["runner.enable_dynamic_batch_size=true"],
    ["runner.task_type=eval"],
    ["runner.task_type=reasoning", "data.rollout_batch_size=7", "algorithm.group_size=1"],
    ["cluster.component_placement={actor: 0-99}"],
    ["nothing"],
]  # fmt: skip


def _pattern(text: str) -> str:
    """A row's text as a regular expression."""
    return "".join(".*" if part.startswith("{") else re.escape(part) for part in re.split(r"(\{[^{}]*\})", text))


@pytest.fixture(scope="module")
def rows() -> re.Pattern[str]:
    """Any cell of the page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = {cell for line in lines for cell in re.split(r"(?<!\\) \| ", line.strip("| "))}
    plain = (re.sub(r"\\([*|])", r"\1", cell).replace("&lt;", "<") for cell in cells)
    said = (c for c in plain if len(re.findall("[A-Za-z]{2}", re.sub(r"\{[^{}]*\}", "", c))) > 2)
    return re.compile("|".join(f"(?:{_pattern(c)})" for c in said), re.DOTALL)


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_what_a_start_prints_stands_on_the_page(
    words: list[str], rows: re.Pattern[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPO)
    with pytest.raises(ConfigErrors) as refused:
        build_plan(load_config("examples/quickstart.yaml", words), 8)
    for error in refused.value.errors:
        assert rows.fullmatch(" ".join(error.rule.split())), error.rule
