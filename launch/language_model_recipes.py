"""The recipes of the language model; see `launch.recipes`.

Imports neither TensorFlow nor Keras.
"""

from launch import config as config_lib
from launch import config_sections as sections

Config = config_lib.Config


def language_model() -> Config:
    """Returns a run of the paper's language model on reviews, for clusters.

    The sizes of Anil et al. 2018 (arXiv:1804.03235), section 3.1: an embedding
    of 256, two layer-normalized LSTMs of 1024 units, 24,000 sub-words, Adam,
    an exchange every 50 steps, and 128 sequences of 32 tokens for each worker:
    set data.global_batch_size to 128 times the workers of a group. For more
    text set data.path, to `tfds:c4/en` say, and how much of it by
    data.arguments.num_train_tokens and num_validation_tokens.
    """
    return Config(
        recipe="language_model",
        model=sections.Model(name="language_model"),
        data=sections.Data(
            name="language_model",
            global_batch_size=128,
            arguments={
                "vocabulary_size": 24_000,
                "sequence_length": 32,
                "validation_fraction": 0.01,
            },
        ),
        optimizer=sections.Optimizer(
            learning_rate=1e-3,
            schedule="cosine",
            warmup_steps=500,
            global_clipnorm=1.0,
        ),
        codistillation=sections.Codistillation(
            burn_in_steps=2000, ramp_steps=1000
        ),
        exchange=sections.Exchange(every_steps=50, refresh_every_steps=10),
        num_steps=20_000,
        evaluate_every_steps=1000,
        checkpoints="best",
    )


def language_model_small() -> Config:
    """Returns a short run on a million tokens of reviews: minutes on a core.

    A group sees its half three times: a constant learning rate, so that runs
    can be compared at any step. Set data.arguments.num_train_tokens for more
    or less text.
    """
    return Config(
        recipe="language_model_small",
        model=sections.Model(
            name="language_model",
            arguments={"embedding_dim": 128, "units": 128, "num_layers": 1},
        ),
        data=sections.Data(
            name="language_model",
            global_batch_size=32,
            arguments={
                "vocabulary_size": 2000,
                "sequence_length": 32,
                "num_train_tokens": 1_000_000,
                "num_validation_tokens": 40_000,
            },
        ),
        optimizer=sections.Optimizer(
            learning_rate=3e-3,
            global_clipnorm=1.0,
        ),
        codistillation=sections.Codistillation(
            burn_in_steps=300, ramp_steps=150
        ),
        exchange=sections.Exchange(
            every_steps=50, refresh_every_steps=10, poll_secs=0.1
        ),
        num_steps=1500,
        evaluate_every_steps=150,
        steps_per_execution=5,
    )
