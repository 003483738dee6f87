"""Five kinds of parallelism for training Transformers on DeepSpeed, driven by RLinf/Megatron-style YAML."""

__version__ = "0.1.0"
