"""Text generation with the weights in training, where they are: sampling, KV cache, batches, every layout."""

from hybrid5d.generation.generate import Generated, Generator
from hybrid5d.generation.request import Request
from hybrid5d.generation.sampling import Sampling
from hybrid5d.generation.stage import Stage

__all__ = ["Generated", "Generator", "Request", "Sampling", "Stage"]
