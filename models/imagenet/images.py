"""Encoded photographs to crops of one size, without decoding the rest."""

import tensorflow as tf

# As of 256 pixels along the shorter side the middle 224 (Goyal et al. 2017).
_CENTRAL_SHARE = 224 / 256
_AREAS = (0.08, 1.0)
_ASPECT_RATIOS = (3 / 4, 4 / 3)


def random_crop(data: tf.Tensor, *, size: int, seed: tf.Tensor) -> tf.Tensor:
    """Returns a random part of an image, by chance mirrored.

    Of 8% to 100% of its area, with sides of 3:4 to 4:3 (Szegedy et al. 2014,
    arXiv:1409.4842, section 6, as in Goyal et al. 2017).

    float32 `[size, size, 3]` in [0, 1], determined by the two int64 numbers of
    the seed. Of an encoded JPEG only the part is decoded; PNG, GIF and BMP are
    read as well.
    """
    seeds = tf.random.split(seed, 2)
    whole = tf.constant([[[0.0, 0.0, 1.0, 1.0]]])
    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        _shape(data),
        bounding_boxes=whole,
        seed=seeds[0],
        min_object_covered=0.0,
        area_range=_AREAS,
        aspect_ratio_range=_ASPECT_RATIOS,
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    image = _read(data, begin[:2], extent[:2], size)
    mirrored = tf.random.stateless_uniform([], seeds[1]) < 0.5
    return tf.where(mirrored, image[:, ::-1], image)


def central_crop(data: tf.Tensor, *, size: int) -> tf.Tensor:
    """Returns the middle of an image: 224 / 256 of its shorter side.

    float32 `[size, size, 3]` in [0, 1].
    """
    sides = _shape(data)[:2]
    shorter = tf.cast(tf.reduce_min(sides), tf.float32)
    side = tf.cast(tf.round(shorter * _CENTRAL_SHARE), tf.int32)
    side = tf.maximum(side, 1)
    return _read(data, (sides - side) // 2, tf.stack([side, side]), size)


def _shape(data: tf.Tensor) -> tf.Tensor:
    return tf.cond(
        tf.io.is_jpeg(data),
        lambda: tf.image.extract_jpeg_shape(data),
        lambda: tf.shape(_decode(data)),
    )


def _read(
    data: tf.Tensor, begin: tf.Tensor, extent: tf.Tensor, size: int
) -> tf.Tensor:
    """Decodes a window `extent` from `begin` on, and resizes it."""
    window = tf.concat([begin, extent], axis=0)
    pixels = tf.cond(
        tf.io.is_jpeg(data),
        lambda: tf.image.decode_and_crop_jpeg(data, window, channels=3),
        lambda: tf.image.crop_to_bounding_box(
            _decode(data), *tf.unstack(window, num=4)
        ),
    )
    return tf.image.resize(pixels, [size, size]) / 255.0


def _decode(data: tf.Tensor) -> tf.Tensor:
    image = tf.io.decode_image(data, channels=3, expand_animations=False)
    return tf.ensure_shape(image, [None, None, 3])
