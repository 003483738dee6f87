"""PPO's value model as a run of its own: the `critic` block in the actor's place, on the same processes. Pure."""

from __future__ import annotations

from dataclasses import replace

from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import ConfigError

_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
          "padded_vocab_size")  # fmt: skip
_NAMES = ("model.", "optim.", "lr_sched.", "deepspeed")  # of the actor's block, which the critic's has too


def critic_config(config: RunConfig) -> RunConfig:
    """The run that the critic is: its block as `actor`, and of the actor's what the block has no keys for.

    Its model is the actor's where it names none; rows and their lengths are the actor's.
    """
    actor, critic = config.actor, config.critic
    lengths = {name: getattr(actor.model, name) for name in ("seq_length", "encoder_seq_length")}
    if critic.model.model_path is None:
        lengths |= {"model_path": actor.model.model_path, "load_weights": actor.model.load_weights}
        lengths |= {name: getattr(actor.model, name) for name in _SIZES}
    own = {
        "model": critic.model.model_copy(update=lengths), "optim": critic.optim, "lr_sched": critic.lr_sched,
        "deepspeed": critic.deepspeed, "seed": actor.seed if critic.seed is None else critic.seed,
        "freeze_parameters": (),
    }  # fmt: skip
    reads = {"adv_type": "raw", "kl_beta": 0.0, "reinpp_kl_beta": 0.0}
    return config.model_copy(
        update={
            "actor": actor.model_copy(update=own),
            "algorithm": config.algorithm.model_copy(update=reads),
            "critic": critic.model_copy(update={"use_critic_model": False}),
        }
    )


def critic_errors(errors: list[ConfigError], known: list[ConfigError]) -> list[ConfigError]:
    """Faults of the critic's run under its own keys, without those that the actor's run has already."""
    said = {(e.key, e.rule) for e in known}
    return [_renamed(e) for e in errors if (e.key, e.rule) not in said]


def _renamed(error: ConfigError) -> ConfigError:
    """The fault under the critic's key; where it is of a key that both runs read, the critic is named."""
    if error.key.startswith(tuple(f"actor.{name}" for name in _NAMES)):
        words = {name: getattr(error, name).replace("actor.", "critic.") for name in ("key", "rule", "fix")}
        return replace(error, **words)
    return replace(error, rule=f"the critic: {error.rule}")
