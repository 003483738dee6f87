"""What the fork server of the tests' ranks imports."""

import gc

import hybrid5d.check.preload
import hybrid5d.launch.run  # noqa: F401
import tests.engine_kit  # noqa: F401

gc.collect()
gc.freeze()
