"""No input ends in a traceback, and what translates closes."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid5d.plan.convert import Translation, translate
from hybrid5d.plan.outputs import json_text, plan_files
from tests.config_kit import EXAMPLES, OWN_RLINF, native, write_yaml

JUNK: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    7,
    10**30,
    1.5,
    -0.0,
    1e300,
    float("nan"),
    float("inf"),
    "",
    " ",
    "x",
    "0",
    "4",
    "1e-3",
    "true",
    "null",
    "all",
    "0-3",
    "3-0",
    "0-3:0-7",
    "a-b",
    "${",
    "${x}",
    "${actor.optim.lr}",
    "${multiply:a,b}",
    "???",
    "${int_div:1,0}",
    "auto",
    [],
    [1],
    ["a", None],
    [[1], {"a": 2}],
    {},
    {"a": 1},
    {"a": {"b": [1, {"c": None}]}},
    "é\u2028\x85",
]


def check(result: Translation) -> None:
    """The whole story can be told; a translation closes."""
    text = json_text(result.to_dict())
    assert text and result.verdict in ("translate", "refuse")
    for error in result.errors:
        assert "\n" not in str(error)[:400] and error.rule and error.fix
    keys = [e["key"] for e in result.report]
    assert len(keys) == len(set(keys))
    plan = result.plan
    if plan is None or result.errors:
        return
    layout, batch = plan.layout, plan.batch
    assert layout.world_size == layout.tp * layout.pp * layout.cp * layout.dp
    assert batch.global_batch_size == batch.micro_batch_size * batch.gradient_accumulation_steps * layout.dp
    assert plan.deepspeed["train_batch_size"] == batch.global_batch_size * layout.cp
    assert all(plan.schedule.lr(k) >= 0 for k in range(20))
    assert set(plan_files(plan))


def paths(tree: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [here] if here else []
    if isinstance(tree, dict):
        for name, value in tree.items():
            found += paths(value, (*here, name))
    return found


def mutate(tree: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, 4)):
        spots = paths(tree)
        if not spots:
            return tree
        spot = rng.choice(spots)
        holder = tree
        for part in spot[:-1]:
            holder = holder[part]
        action, value = rng.randrange(6), holder[spot[-1]]
        if action == 0:
            del holder[spot[-1]]
        elif action == 1:
            holder[spot[-1]] = str(value)
        elif action == 2:
            holder[f"{spot[-1]}x"] = value
        elif action == 3:
            holder[spot[-1]] = "${" + ".".join(map(str, rng.choice(spots))) + "}"
        else:
            holder[spot[-1]] = rng.choice(JUNK)
    return tree


def seeds() -> list[dict[str, Any]]:
    trees = [native(), yaml.safe_load((EXAMPLES / "base_grpo.yaml").read_text())]
    trees += [yaml.safe_load((OWN_RLINF / name).read_text()) for name in ("grpo.yaml", "ppo.yaml")]
    return trees


@pytest.mark.parametrize("seed", range(8))
def test_mutated_trees(seed: int, tmp_path: Path) -> None:
    rng, trees = random.Random(seed), seeds()
    for number in range(20):
        tree = mutate(rng.choice(trees), rng)
        path = write_yaml(tmp_path / f"{number}.yaml", tree)
        try:
            check(translate(path))
        except Exception as exc:
            raise AssertionError(path.read_text()) from exc


@pytest.mark.parametrize("value", JUNK, ids=lambda v: repr(v)[:30])
def test_each_key_takes_each_junk(value: Any, tmp_path: Path) -> None:
    tree = native()
    for spot in paths(tree):
        mutated = copy.deepcopy(tree)
        holder = mutated
        for part in spot[:-1]:
            holder = holder[part]
        holder[spot[-1]] = value
        try:
            check(translate(write_yaml(tmp_path / "a.yaml", mutated)))
        except Exception as exc:
            raise AssertionError(f"{spot} = {value!r}") from exc


TEXTS = {
    "empty": b"",
    "only a comment": b"# nothing\n",
    "not utf-8": b"actor: \xff\xfe{}\n",
    "utf-16": "actor: {}\n".encode("utf-16"),
    "nul bytes": b"actor: {seed: 1}\x00\n",
    "a list": b"- 1\n- 2\n",
    "a scalar": b"42\n",
    "unclosed": b"actor: {model: [1, 2\n",
    "tabs": b"actor:\n\tseed: 1\n",
    "duplicate": b"actor: {seed: 1, seed: 2}\n",
    "python tag": b"actor: !!python/object/apply:os.system ['true']\n",
    "binary tag": b"actor: {seed: !!binary aGVsbG8=}\n",
    "set tag": b"actor: {model: !!set {a, b}}\n",
    "date": b"runner: {experiment_name: 2024-01-01}\nactor: {seed: 1}\n",
    "cycle": b"actor: &a\n  model: *a\n",
    "cyclic list": b"actor: {x: &l [*l]}\n",
    "cyclic references": b"actor: {seed: '${runner.max_steps}', "
    b"micro_batch_size: "
    b"1}\nrunner: {max_steps: "
    b"'${actor.seed}'}\n",
    "self reference": b"actor: {optim: '${actor}'}\n",
    "anchors": b"x: &m {tensor_model_parallel_size: 2}\nactor: {model: {<<: *m, pipeline_model_parallel_size: 2}}\n",
    "undefined alias": b"actor: *nowhere\n",
    "merge of a scalar": b"actor: {<<: 3}\n",
    "odd keys": b"actor: {1: 2, null: 3, true: 4, [a]: 5}\n",
    "mapping key": b"actor: {? {a: 1} : 2}\n",
    "two documents": b"actor: {seed: 1}\n---\nactor: {seed: 2}\n",
    "deep": b"actor: " + b"{a: " * 3000 + b"1" + b"}" * 3000 + b"\n",
    "deep list": b"actor: " + b"[" * 5000 + b"]" * 5000 + b"\n",
    "bomb": b"a: &a [1,1,1,1,1,1,1,1,1]\n"
    + b"".join(b"%c: &%c [*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c]\n" % (c + 1, c + 1, *[c] * 9) for c in range(97, 107))
    + b"actor: {x: *k}\n",
    "one megabyte": b"actor: {seed: 1}\n"
    + b"".join(b"k%d: {a: %d, b: '${actor.seed}'}\n" % (i, i) for i in range(28000)),
    "long line": b"actor: {seed: 1}\nx: " + b"y" * 1_000_000 + b"\n",
    "dotted key": b"'actor.optim.lr': 3\nactor: {optim: {lr: 1}, 'optim.lr': 2}\n",
    "big int": b"actor: {seed: " + b"9" * 5000 + b"}\n",
    "octal": b"actor: {seed: 0o17, micro_batch_size: 0b2}\n",
    "sexagesimal": b"cluster: {component_placement: {actor: 1:2}}\nactor: {seed: 1}\n",
    "defaults of a number": b"defaults: 3\nactor: {seed: 1}\n",
    "defaults of junk": b"defaults: [1, null, {a: 1, b: 2}, [x], {'override': 1}, '']\nactor: {seed: 1}\n",
    "defaults outside": b"defaults: ['../../etc/passwd', '/etc/passwd', 'a b']\nactor: {seed: 1}\n",
    "placement of junk": b"cluster: {component_placement: [1]}\nactor: {seed: 1}\n",
    "huge placement": b"cluster: {num_nodes: 1000000000, component_placement: {actor: all}}\nactor: {seed: 1}\n",
    "huge degrees": b"actor: {model: {tensor_model_parallel_size: 1000000000000}}\n",
    "huge batch": b"actor: {global_batch_size: 1000000000000000000000}\n",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", TEXTS)
def test_raw_texts(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(TEXTS[name])
    check(translate(path))


@pytest.mark.parametrize("seed", range(4))
def test_damaged_bytes(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    text = (EXAMPLES / "base_grpo.yaml").read_bytes()
    for number in range(40):
        data = bytearray(text)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(data))
            if rng.random() < 0.5:
                data[at] = rng.randrange(256)
            else:
                del data[at : at + rng.randrange(1, 40)]
        path = tmp_path / f"{number}.yaml"
        path.write_bytes(bytes(data))
        try:
            check(translate(path))
        except Exception as exc:
            raise AssertionError(bytes(data)) from exc
