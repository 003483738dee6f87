"""PPO's value model as a run of its own: the `critic` block in the actor's place, on the same processes. Pure."""

from __future__ import annotations

from dataclasses import replace

from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import ConfigError
from hybrid5d.plan.draft import MODEL_NUMBERS

_LENGTHS = ("seq_length", "encoder_seq_length")
_NAMES = ("model.", "optim.", "lr_sched.", "deepspeed")  # of the actor's block, which the critic's has too


def critic_config(config: RunConfig) -> RunConfig:
    """The run that the critic is: its block as `actor`, and of the actor's what the block has no keys for.

    Its model is the actor's where it names none; rows and their lengths are the actor's.
    """
    actor, critic = config.actor, config.critic
    given = {name: getattr(actor.model, name) for name in _of_the_actor(config)}
    if critic.model.load_weights is None and critic.model.model_path is None:
        given["load_weights"] = actor.model.load_weights
    own = {
        "model": critic.model.model_copy(update=given), "optim": critic.optim, "lr_sched": critic.lr_sched,
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


def _of_the_actor(config: RunConfig) -> tuple[str, ...]:
    """Keys of the critic's model that the actor's values stand for."""
    return _LENGTHS if config.critic.model.model_path else (*_LENGTHS, "model_path", "hidden_size", *MODEL_NUMBERS)


def replaced(config: RunConfig) -> dict[str, str]:
    """The critic's keys that are written and not read, as the actor's value is taken: what to say of each."""
    own, actor = config.critic.model, config.actor.model
    return {
        f"critic.model.{name}": f"the critic has the actor's, {getattr(actor, name)}"
        for name in _of_the_actor(config)
        if getattr(own, name) not in (None, getattr(actor, name))
    }


def critic_notices(config: RunConfig) -> list[str]:
    """`replaced`, each in a sentence."""
    model = config.critic.model
    return [f"{key}={getattr(model, key.split('.')[-1])} is not read: {why}" for key, why in replaced(config).items()]


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
