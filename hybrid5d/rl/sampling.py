"""How rollouts are drawn; the engine draws them (`Engine.generate`)."""

from hybrid5d.generation.sampling import Sampling

__all__ = ["Sampling"]
