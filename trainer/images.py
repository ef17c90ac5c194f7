"""Read a folder of images: `<class>/*.png`, or `train/<class>/*.png` and `test/<class>/*.png`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletier.tensorflow_setup import available_cpus, import_tensorflow
from trainer.mnist import CLASS_COUNT, SIDE, Example, InputError
from trainer.progress import with_progress

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp")
KINDS = "png, jpg and bmp"


@dataclass(frozen=True)
class ImageFolder:
    """The images of each split by class; the label of a class is its index in `classes`, which are sorted."""

    splits: Mapping[str, Mapping[str, Sequence[Path]]]

    @property
    def classes(self) -> list[str]:
        return sorted(self.splits["train"])

    @property
    def files(self) -> list[Path]:
        return [path for split in self.splits.values() for images in split.values() for path in images]


def find(directory: Path) -> ImageFolder:
    """Return the images below a directory; InputError for an invalid layout, or too few or too many classes."""
    splits = {name: directory / name for name in ("train", "test") if _folders(directory / name)}
    if "train" not in splits:
        splits = {"train": directory}
    folder = ImageFolder({name: {path.name: _images(path) for path in _folders(top)} for name, top in splits.items()})
    classes = folder.classes
    if not classes:
        raise InputError(
            f"{directory} has no folders of images; valid are <class>/*.png, jpg or bmp, in train/ and test/ or not"
        )
    if len(classes) == 1:
        raise InputError(f"{directory} holds one class only, {classes[0]}: two or more are needed")
    if len(classes) > CLASS_COUNT:
        raise InputError(f"{directory} holds {len(classes)} classes; the models distinguish {CLASS_COUNT} at most")
    for name in folder.splits.get("test", ()):
        if name not in classes:
            raise InputError(f"{directory}/test has the class {name}, which is not in train")
    return folder


def _folders(directory: Path) -> list[Path]:
    """Return the folders in a directory, except those whose name begins with `.` or `_`."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted(path for path in paths if path.is_dir() and not path.name.startswith((".", "_")))


def _images(directory: Path) -> list[Path]:
    visible = (path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
    paths = sorted(path for path in visible if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise InputError(f"{directory} holds no image; valid are {KINDS}")
    return paths


def read(folder: ImageFolder) -> dict[str, list[Example]]:
    """Return the images of each split, gray and 28×28, with their labels; InputError if one cannot be decoded.

    Transparent parts become white, or black if the visible parts are lighter than middle gray, so that strokes stay visible. An
    alpha channel that is 0 everywhere is ignored: many 32-bit BMP files have one.
    """
    examples = {}
    for name, split in folder.splits.items():
        labelled = [(path, folder.classes.index(label)) for label, paths in split.items() for path in paths]
        images = with_progress(_decode([path for path, _ in labelled]), f"decoding {name} image", len(labelled))
        examples[name] = [(image, label) for image, (_, label) in zip(images, labelled, strict=True)]
    return examples


def _decode(paths: Sequence[Path]) -> Iterator[bytes]:
    """Yield each image's 784 bytes, in the order of the paths."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # otherwise TensorFlow's decoders log invalid files, too
    tf = import_tensorflow()

    def flatten(gray: Any, alpha: Any) -> Any:
        gray = tf.cast(gray, tf.float32)
        opacity = tf.where(tf.reduce_any(alpha > 0), tf.cast(alpha, tf.float32) / 255, 1.0)
        light = tf.reduce_sum(gray * opacity) > 127.5 * tf.reduce_sum(opacity)
        return gray * opacity + tf.where(light, 0.0, 255.0) * (1 - opacity)

    def decode(path: Any) -> Any:
        image = tf.io.decode_image(tf.io.read_file(path), expand_animations=False)
        image = tf.ensure_shape(image, [None, None, None])
        channels = tf.shape(image)[2]
        gray = tf.cond(channels >= 3, lambda: tf.image.rgb_to_grayscale(image[..., :3]), lambda: image[..., :1])
        flat = tf.cond(channels % 2 == 0, lambda: flatten(gray, image[..., -1:]), lambda: tf.cast(gray, tf.float32))
        return tf.cast(tf.round(tf.image.resize(flat, [SIDE, SIDE], antialias=True)), tf.uint8)

    names = tf.data.Dataset.from_tensor_slices([str(path) for path in paths])
    images = iter(names.map(decode, num_parallel_calls=available_cpus()))
    for path in paths:
        try:
            yield next(images).numpy().tobytes()
        except tf.errors.OpError:
            raise InputError(f"{path} cannot be decoded; valid are {KINDS}") from None
