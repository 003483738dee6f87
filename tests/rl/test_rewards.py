"""Rewards: math by the last box, own functions that fail in every way, and no process left behind (R21, R22)."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hybrid5d.errors import ConfigErrors, DataError
from hybrid5d.rl.reward_worker import last_box
from hybrid5d.rl.rewards import RewardOptions, Scorer, answers_of


@pytest.mark.parametrize(
    "text, box",
    [
        (r"First \boxed{5}. Wrong; the answer is \boxed{7}.", r"\boxed{7}"),
        (r"so \boxed{\frac{1}{2}} it is", r"\boxed{\frac{1}{2}}"),
        (r"\boxed{5} and \boxed{7", r"\boxed{5}"),
        (r"\boxed {\left\{ 1 \right.}", r"\boxed{\left\{ 1 \right.}"),
        (r"\boxed{\boxed{3}+1}", r"\boxed{3}"),
        (r"\boxed{}", r"\boxed{}"),
        (r"\boxed 7", None),
        ("7", None),
        ("", None),
    ],
)
def test_last_balanced_box(text: str, box: str | None) -> None:
    assert last_box(text) == box


@pytest.fixture(scope="module")
def math() -> Iterator[Scorer]:
    with Scorer(RewardOptions(scale=5.0, answer_key="solutions", num_workers=1)) as scorer:
        yield scorer


MATH = [
    (r"First \boxed{5}. Wrong; the answer is \boxed{7}.", "7", True),
    (r"First \boxed{5}. Wrong; the answer is \boxed{7}.", 5, False),
    (r"\boxed{\frac{1}{2}}", 0.5, True),
    (r"\boxed{41}, no: \boxed{42}", "42", True),
    (r"\boxed{A}", "A", True),
    (r"\boxed{B}", "A", False),
    (r"\boxed{(1,2)}", "(1,2)", True),
    (r"\boxed{7}", ["8", r"the \boxed{7}"], True),
    (r"\boxed{7}", ["8", "9"], False),
    ("7", "7", False),
    (r"\boxed{\frac{", "7", False),
    ("", "7", False),
]


def test_math(math: Scorer) -> None:
    """R21: right +5, wrong -5."""
    rows = [{"solutions": key} for _, key, _ in MATH]
    scores = math.score(["q"] * len(rows), [text for text, _, _ in MATH], rows)
    assert scores.values.tolist() == [5.0 if right else -5.0 for _, _, right in MATH]
    assert scores.values.dtype == np.float32 and scores.errors == ()
    assert math.score([], [], []).values.shape == (0,)


@pytest.mark.parametrize("value", ["", "  ", None, [], ["7", ""]])
def test_no_answer_is_refused(value: Any, math: Scorer) -> None:
    with pytest.raises(DataError, match="answer_key 'solutions'"):
        answers_of({"solutions": value}, "solutions")
    with pytest.raises(DataError):
        math.score(["q"], ["r"], [{"solutions": value}])


def test_an_answer_that_takes_too_long_is_wrong() -> None:
    """A power tower; the other answers of the step keep theirs, and nothing ends the job."""
    tower = r"\boxed{9^{9^{9^{9^{9}}}}}"
    with Scorer(RewardOptions(timeout=2.0, num_workers=2)) as scorer:
        scores = scorer.score(["q"] * 3, [r"\boxed{1}", tower, r"\boxed{1}"], [{"answer": "1"}] * 3)
        assert scores.values.tolist() == [1, -1, 1]


OWN = """
import os, time
import numpy
import helper

def score(prompt, response, row):
    print("printing does no harm")
    n = row["n"]
    if n == 2: time.sleep(3600)
    if n == 5: raise KeyError("five")
    if n == 6: return None
    if n == 7: return numpy.float32(1)
    if n == 8: os._exit(3)
    if n == 9: return float("nan")
    if n == 10: return "1.0"
    if n == 11: return len(prompt) == helper.TWO
    return n + len(prompt) / 10 + len(response) / 100

def many(prompts, responses, rows):
    if rows[0]["n"] == 3: return [1.0]
    return [len(rows)] * len(rows)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "helper.py").write_text("TWO = 2")
    return f"{tmp_path}/own.py"


def _ask(scorer: Scorer, numbers: list[int]) -> Any:
    return scorer.score(["pp"] * len(numbers), ["r"] * len(numbers), [{"n": n} for n in numbers])


def test_own_function_that_fails(own: str) -> None:
    """R22: a hang, an exception, None, a dead process, NaN and text are reported with the row; the rest is scored."""
    with Scorer(RewardOptions(function=f"{own}:score", timeout=1.0)) as scorer:
        with pytest.raises(DataError) as caught:
            _ask(scorer, list(range(12)))
        lines = str(caught.value).splitlines()
        assert [line.split(": ")[1] for line in lines[:6]] == [f"row {n}" for n in (2, 5, 6, 8, 9, 10)]
        for line, why in zip(lines, ("no result within 1 s", "KeyError: 'five'", "None", "code 3", "nan", "'1.0'")):
            assert why in line
        assert "reward.on_error" in lines[5]
        again = _ask(scorer, [0, 1, 3, 4, 7, 11])  # the same scorer goes on
        np.testing.assert_allclose(again.values, [0.21, 1.21, 3.21, 4.21, 1, 1], rtol=1e-6)


def test_on_error_counts_a_number(own: str) -> None:
    options = RewardOptions(function=f"{own}:score", timeout=1.0, on_error=-2.0)
    with Scorer(options) as scorer:
        scores = _ask(scorer, [0, 1, 2, 3, 4, 5, 6, 7])
        np.testing.assert_allclose(scores.values, [0.21, 1.21, -2, 3.21, 4.21, -2, -2, 1], rtol=1e-6)
        assert [text.split(":")[0] for text in scores.errors] == ["row 2", "row 5", "row 6"]
        assert _ask(scorer, [1]).errors == ()
        processes = [psutil.Process(w.process.pid) for w in scorer.workers]
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def test_function_of_lists(own: str) -> None:
    """Each worker gets an equal run of rows; a wrong count is an error of all rows of its run."""
    with Scorer(RewardOptions(function=f"{own}:many", on_error=0.5)) as scorer:
        assert _ask(scorer, [0, 1, 2, 4, 5]).values.tolist() == [3, 3, 3, 2, 2]
        scores = _ask(scorer, [0, 1, 3, 4])
        assert scores.values.tolist() == [2, 2, 0.5, 0.5] and len(scores.errors) == 2


@pytest.mark.parametrize("name, why", [("own.py:absent", "absent"), ("no.py:score", "no.py"), ("own.py", "reward")])
def test_function_that_cannot_be_loaded(own: str, name: str, why: str) -> None:
    with pytest.raises(ConfigErrors, match=why):
        Scorer(RewardOptions(function=str(Path(own).parent / name), num_workers=1))


KILLED = """
import sys
from hybrid5d.rl.rewards import RewardOptions, Scorer
scorer = Scorer(RewardOptions(function=sys.argv[1], timeout=3600))
print(*(w.process.pid for w in scorer.workers), flush=True)
scorer.score([""], [""], [{"n": 2}])
"""


def test_workers_end_with_a_killed_trainer(own: str) -> None:
    """R22: at exit no process is left, also where the trainer is killed while a worker hangs."""
    command = [sys.executable, "-c", KILLED, f"{own}:score"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()]
        assert len(workers) == 2
        time.sleep(0.5)
        trainer.kill()
    gone, alive = psutil.wait_procs(workers, 10)
    assert len(gone) == 2 and not alive
