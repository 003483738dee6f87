"""Text generation with the weights in training, where they are: sampling, KV cache, batches, every layout."""

from hybrid5d.generation.sampling import Sampling

__all__ = ["Sampling"]
