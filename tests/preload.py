"""What the fork server of the tests' ranks imports."""

import hybrid5d.check.preload  # noqa: I001  first: it settles the environment

import gc
import tests.engine_kit  # noqa: F401
import hybrid5d.launch.run  # noqa: F401

gc.collect()
gc.freeze()
