"""docs/python.md says what can be imported, with the signatures that it has."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module

from tests.docs.python_api import PAGE, page


def test_the_page_is_what_the_package_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run make python-doc"


def test_each_block_is_the_real_signature() -> None:
    """Read back from the page: parameter names, their order and which of them have a default."""
    checked = 0
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        module = import_module(section.split("`")[1])
        for block in re.findall(r"```python\n(.+?)\n```", section, re.DOTALL):
            (written,) = ast.parse(f"def {block.replace('.', '__', block.partition('(')[0].count('.'))}: ...").body
            assert isinstance(written, ast.FunctionDef)
            thing = module
            for name in block.partition("(")[0].split("."):
                thing = getattr(thing, name)
            if inspect.isclass(thing) and issubclass(thing, Exception) and "__init__" not in vars(thing):
                continue
            real = [p for p in inspect.signature(thing).parameters.values() if p.name not in ("self", "cls")]
            plain, keyword = written.args.args, written.args.kwonlyargs
            assert [a.arg for a in (*plain, *keyword)] == [p.name for p in real if p.kind not in (p.VAR_POSITIONAL,)]
            assert len(keyword) == sum(p.kind is p.KEYWORD_ONLY for p in real)
            given = len(written.args.defaults) + sum(d is not None for d in written.args.kw_defaults)
            assert given == sum(p.default is not p.empty for p in real), block
            checked += 1
    assert checked > 100
