"""The command `hybrid5d`: one verb, one file."""

from __future__ import annotations

import sys
from os.path import expanduser


def main() -> None:
    """Entry of `hybrid5d` and `python -m hybrid5d`."""
    import typer  # here, so that ranks, which import this package too, do not pay for it

    from hybrid5d.cli.check import check
    from hybrid5d.cli.config import app as config
    from hybrid5d.cli.convert import convert
    from hybrid5d.cli.env import env
    from hybrid5d.cli.export import export
    from hybrid5d.cli.plan import plan
    from hybrid5d.cli.report import report
    from hybrid5d.cli.trace import trace
    from hybrid5d.cli.train import evaluate, train

    app = typer.Typer(
        name="hybrid5d",
        help="Five-axis parallel training on DeepSpeed, driven by RLinf/Megatron-style YAML.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.command()(train)
    app.command(name="eval")(evaluate)
    app.command()(convert)
    app.command()(export)
    app.command()(plan)
    app.command()(check)
    app.command()(env)
    app.command()(report)
    app.command()(trace)
    app.add_typer(config, name="config")
    app(args=[_at_home(word) for word in sys.argv[1:]])


def _at_home(word: str) -> str:
    """`~/x`, also as `--out=~/x`, which a shell leaves as it is; not in overrides (`~key`, `key=~/x`)."""
    option, sign, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return option + sign + expanduser(value) if value.startswith("~/") else word
