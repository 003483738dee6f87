"""Reinforcement learning on token sequences: advantages and losses as plain tensor functions, engine or not.

RLinf's names and rules (its 0.3.0), exact over the batch that is given; where RLinf differs, the function says how.
"""

from hybrid5d.rl.advantages import compute_advantages
from hybrid5d.rl.losses import aggregate, kl_penalty, policy_loss, value_loss

__all__ = ["aggregate", "compute_advantages", "kl_penalty", "policy_loss", "value_loss"]
