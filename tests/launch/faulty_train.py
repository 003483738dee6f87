"""examples/train.py with one rank that ends in step 2 in the way FAULT names. Run by test_launch.py."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

RANK = "3"


def fault() -> None:
    """End this rank."""
    kind = os.environ["FAULT"]
    if kind == "raise":
        raise ValueError("the reason\nand its second line")
    if kind == "exit0":
        sys.exit(0)
    if kind == "vanish":
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Arm the fault, then run as usual."""
    if os.environ.get("RANK") == RANK and "FAULT" in os.environ:
        import builtins

        original = builtins.__import__

        def importing(name: str, *args: Any, **kwargs: Any) -> Any:
            module = original(name, *args, **kwargs)
            engine = sys.modules.get("hybrid5d.engine.engine")
            if engine is not None and hasattr(engine, "Engine"):
                builtins.__import__ = original
                step = engine.Engine.train_batch

                def train_batch(self: Any, batch: Any) -> Any:
                    if self.global_step == 1:
                        fault()
                    return step(self, batch)

                engine.Engine.train_batch = train_batch  # type: ignore[method-assign]
            return module

        builtins.__import__ = importing
    from hybrid5d.worker import main as worker

    return worker()


if __name__ == "__main__":
    sys.exit(main())
