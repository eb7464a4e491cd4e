"""Tasks of KerasHub as students and as teachers, small and without presets."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import tiers

models = pytest.importorskip(
    "keras_hub", reason="needs keras-hub (extra: hub)"
).models

_LENGTH, _EXAMPLES = 6, 8


class _Preprocessor(keras.layers.Layer):
    """Stands for one with a vocabulary, which would be a download."""


def _tokens(num_ids=12):
    return np.random.default_rng(0).integers(1, num_ids, (_EXAMPLES, _LENGTH))


def _text_classifier():
    backbone = models.BertBackbone(
        vocabulary_size=12,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=_LENGTH,
    )
    task = models.BertTextClassifier(backbone, num_classes=3, preprocessor=None)
    x = {
        "token_ids": _tokens(),
        "padding_mask": np.ones((_EXAMPLES, _LENGTH), "int32"),
        "segment_ids": np.zeros((_EXAMPLES, _LENGTH), "int32"),
    }
    return task, x, np.arange(_EXAMPLES) % 3


def _image_classifier():
    backbone = models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64],
        stackwise_num_blocks=[1],
        stackwise_num_strides=[1],
        block_type="basic_block",
        image_shape=(8, 8, 3),
    )
    task = models.ResNetImageClassifier(
        backbone, num_classes=3, preprocessor=None
    )
    x = np.random.default_rng(1).normal(size=(_EXAMPLES, 8, 8, 3))
    return task, x.astype("float32"), np.arange(_EXAMPLES) % 3


def _language_model():
    backbone = models.GPT2Backbone(
        vocabulary_size=12,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=_LENGTH,
    )
    task = models.GPT2CausalLM(backbone, preprocessor=None)
    tokens = _tokens()
    x = {"token_ids": tokens, "padding_mask": np.ones_like(tokens, "int32")}
    return task, x, np.roll(tokens, -1, axis=1)


@pytest.mark.parametrize(
    "make", [_image_classifier, tiers.deep(_language_model)]
)
def test_a_task_learns_from_another_in_memory(make, tmp_path):
    keras.utils.set_random_seed(1)
    student, x, y = make()
    teacher, _, _ = make()
    cases.randomize(teacher, 3)
    before = [value.copy() for value in teacher.get_weights()]
    model = cases.codistill(
        student,
        tfdistill.teachers.FixedTeacher(teacher),
        optimizer=keras.optimizers.Adam(0.03),
        distillation_loss=tfdistill.losses.ForwardKL(),
        distillation_weight=10.0,
    )
    logs = model.fit(x, y, epochs=3, batch_size=4, verbose=0).history
    assert 0 < logs["distillation_loss"][-1] < logs["distillation_loss"][0]
    cases.assert_close(teacher, before)
    # Its own methods are as they were.
    if make is _language_model:
        prompt = {name: value[:2] for name, value in x.items()}
        found = student.generate(prompt, stop_token_ids=None)
        assert found["token_ids"].shape == (2, _LENGTH)
    model.save(tmp_path / "a.keras")
    # Keras cannot restore what a `compile` of the task's own was given; each
    # task compiles itself.
    again = keras.models.load_model(tmp_path / "a.keras", compile=False)
    assert type(again) is type(student)
    np.testing.assert_allclose(
        again.predict(x, verbose=0), student.predict(x, verbose=0), rtol=1e-4
    )


def test_what_of_a_task_would_not_run_is_refused():
    student, _, _ = _text_classifier()
    student.preprocessor = _Preprocessor()
    with pytest.raises(ValueError, match=r"`dataset.map\(preprocessor\)`"):
        tfdistill.CodistillModel(student)
    student.preprocessor = None
    tfdistill.CodistillModel(student)
    kind = type(
        "Detector",
        (models.BertTextClassifier,),
        {"predict_step": lambda self, *args: None},
    )
    own = kind(student.backbone, num_classes=3, preprocessor=None)
    with pytest.raises(ValueError, match="its own predict_step"):
        tfdistill.CodistillModel(own)


@pytest.mark.deep
def test_groups_that_adapt_one_backbone_send_adapters_and_hold_it_once(
    exchange,
):
    def adapted(seed):
        keras.utils.set_random_seed(0)
        task, x, y = _text_classifier()
        task.backbone.enable_lora(1)
        rng = np.random.default_rng(seed)
        for variable in task.trainable_variables:
            variable.assign(rng.normal(size=variable.shape))
        return task, x, y

    teacher, x, y = adapted(1)
    teaching = cases.codistill(teacher)
    exporter = cases.exporter(exchange, group=1, key_every=100)
    cases.fit(teaching, x, y, batch_size=8, callbacks=[exporter])
    model = cases.codistill(adapted(0)[0], cases.peers(exchange))
    cases.prepare(model, x, y)
    cases.load(model, 1)
    theirs = cases.teacher_variables(model)
    ours = {id(v.value) for v in model.student.variables}
    frozen = [v for v in theirs if id(v) in ours]
    assert len(frozen) == len(model.graph.frozen) > len(theirs) / 2
    base = pathlib.Path(exchange.bases.root)
    assert len(list(base.iterdir())) == 1
    assert sum(v.numpy().nbytes for v in frozen) == sum(
        path.stat().st_size for path in base.iterdir()
    )
    inputs = {name: tf.constant(value) for name, value in x.items()}
    (found,) = model.teachers._teachers[0]._copy.infer(inputs)
    np.testing.assert_allclose(found, teacher(x, training=False), rtol=1e-5)
