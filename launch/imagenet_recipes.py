"""The recipe of ImageNet; see `launch.recipes`.

Imports neither TensorFlow nor Keras.
"""

from launch import config as config_lib
from launch import config_sections as sections

Config = config_lib.Config

_NUM_IMAGES, _BATCH_SIZE = 1_281_167, 16_384


def imagenet() -> Config:
    """Returns a run of ResNet-50 on ImageNet at batch 16,384, for clusters.

    The large-batch setting of Anil et al. 2018 (arXiv:1804.03235), by the
    recipe of Goyal et al. 2017 (arXiv:1706.02677): 78 steps are a pass over
    the 1,281,167 images, and the run has 90 of them; two groups that share
    the images out see each their half twice as often. The rate rises to
    0.1 x batch / 256 in 5 passes and drops after 30, 60 and 80. A group that
    learns from others drops later, and its weight decay falls with the rate,
    as Sodhani et al. 2020 (arXiv:2010.02838) found needful: 36, 76 and 88
    passes are their schedule at twice its length. Keras keeps the rate in the
    momentum and does not correct it at a drop (Goyal et al., remark 2). On
    hardware for it override dtype_policy=mixed_bfloat16.
    """
    pass_steps = _NUM_IMAGES // _BATCH_SIZE
    return Config(
        recipe="imagenet",
        model=sections.Model(name="imagenet"),
        data=sections.Data(name="imagenet", global_batch_size=_BATCH_SIZE),
        optimizer=sections.Optimizer(
            name="sgd",
            learning_rate=0.1 * _BATCH_SIZE / 256,
            schedule="steps",
            boundaries=tuple(pass_steps * drop for drop in (30, 60, 80)),
            warmup_steps=5 * pass_steps,
            warmup_from=0.1,
            weight_decay=1e-4,
            arguments={"momentum": 0.9, "nesterov": True},
        ),
        codistillation=sections.Codistillation(
            burn_in_steps=3000,
            boundaries=tuple(pass_steps * drop for drop in (36, 76, 88)),
            weight_decay_factors=(0.1, 0.0, 0.0),
        ),
        exchange=sections.Exchange(every_steps=50, refresh_every_steps=10),
        num_steps=90 * pass_steps,
        evaluate_every_steps=5 * pass_steps,
        checkpoints="best",
    )
