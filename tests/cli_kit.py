"""The command `hybrid5d` in this process: what it prints, and its exit code."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from hybrid5d.cli import main

REPO = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def hybrid5d(*words: Any, cwd: Path = REPO) -> Done:
    """`hybrid5d WORDS`, run in `cwd`."""
    out, err = io.StringIO(), io.StringIO()
    argv = mock.patch.object(sys, "argv", ["hybrid5d", *map(str, words)])
    code: Any = 0
    before = os.getcwd()
    os.chdir(cwd)
    try:
        with argv, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as exc:
        code = exc.code
    finally:
        os.chdir(before)
    return Done(int(code or 0), out.getvalue(), err.getvalue())
