"""Custom data: folders of images and CSV, split and shuffled the same each time; one line per error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer import custom_data, records
from trainer.mnist import InputError, Split

PIXELS = 784


def gray_image(number: int) -> Any:
    """Return a gray image that is unique for its number."""
    return np.random.default_rng(number).integers(0, 256, (28, 28), np.uint8)


def save(path: Path, pixels: Any) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def csv_row(label: object, pixels: Any) -> str:
    return ",".join(map(str, [label, *pixels]))


def image_label_pairs(split: Split) -> list[tuple[bytes, int]]:
    return [(image, label) for image, label in records.examples(split, 0, 1)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write two classes of ten images, as PNG."""
    for number in range(20):
        save(tmp_path / "pictures" / ("cat", "dog")[number % 2] / f"{number}.png", gray_image(number))
    return tmp_path / "pictures"


def test_a_folder_becomes_records_and_is_read_back(folder: Path, tmp_path: Path) -> None:
    from trainer.data import check, eval_pipeline, find_files

    dest = tmp_path / "records"
    arguments = ["--source", str(folder), "--dest", str(dest), "--shards", "4", "--gzip", "--test-share", "0.2"]
    assert records.main(arguments) == 0
    manifest = json.loads((dest / "manifest.json").read_text())
    assert (manifest["classes"], manifest["records"]) == (["cat", "dog"], {"train": 16, "test": 4})
    actual = set()
    for split, count in (("train", 16), ("test", 4)):
        files = find_files([str(dest)], split)
        assert len(files) == (4 if split == "train" else 1)
        check(files, count)
        for images, labels in eval_pipeline(files):
            actual |= {(bytes((i.numpy() * 255).round().astype("uint8")), int(n)) for i, n in zip(images, labels, strict=True)}
    assert actual == {(gray_image(number).tobytes(), number % 2) for number in range(20)}


def test_records_follow_their_source(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dest = tmp_path / "records"
    arguments = ["--source", str(folder), "--dest", str(dest)]
    assert records.main(arguments) == 0
    first = {path.name: path.read_bytes() for path in dest.iterdir()}
    capsys.readouterr()
    assert records.main(arguments) == 0
    assert capsys.readouterr().out == f"{dest} is complete: 19 files\n"  # 18 images to train on, each in its own
    assert records.main([*arguments, "--force"]) == 0
    assert {path.name: path.read_bytes() for path in dest.iterdir()} == first
    save(folder / "dog" / "new.png", gray_image(99))
    assert records.main(arguments) == 0
    assert json.loads((dest / "manifest.json").read_text())["records"] == {"train": 19, "test": 2}
    assert len(list(dest.glob("train*"))) == 19


def test_train_and_test_folders_are_kept_as_splits(tmp_path: Path) -> None:
    for number in range(8):
        save(tmp_path / ("train" if number < 6 else "test") / str(number % 2) / f"{number}.bmp", gray_image(number))
    save(tmp_path / "train" / ".thumbnails" / "0.png", gray_image(9))
    save(tmp_path / "train" / "1" / ".hidden.png", gray_image(9))
    (tmp_path / "train" / "1" / "notes.txt").write_text("of no interest")
    splits, classes = custom_data.load([tmp_path], 0.5)
    assert classes == ["0", "1"]
    assert sorted(image_label_pairs(splits["test"])) == sorted((gray_image(number).tobytes(), number % 2) for number in (6, 7))
    assert len(splits["train"].labels) == 6


def test_images_are_converted_to_gray_and_resized(tmp_path: Path) -> None:
    gray = np.full((28, 28), 200, np.uint8)
    colour = np.stack([np.full((56, 84), value, np.uint8) for value in (255, 0, 0)], -1)
    kinds: dict[str, Any] = {
        "gray.png": gray,
        "gray.JPG": gray,
        "two.png": np.stack([gray, gray // 2], -1),
        "red.png": colour,
        "red.bmp": colour,
        "red.jpeg": colour,
        "alpha.png": np.concatenate([colour, colour[..., :1]], -1),
    }
    for name, pixels in kinds.items():
        save(tmp_path / "a" / name, pixels)
    save(tmp_path / "b" / "black.png", gray * 0)
    splits, _ = custom_data.load([tmp_path], 0.01)
    levels = sorted({pixel for split in splits.values() for image, _ in image_label_pairs(split) for pixel in image})
    assert (
        {0, 78, 200} <= set(levels) <= {0, 200, *range(74, 79)}
    )  # red is 76 in gray, JPEG's about that; 78 is 200 at alpha 100


@pytest.mark.parametrize("suffix", ["png", "bmp"])
@pytest.mark.parametrize(
    ("stroke", "alpha", "expected"),
    [
        (0, 255, {0, 255}),
        (0, 102, {153, 255}),
        (255, 255, {0, 255}),
        (255, 102, {0, 102}),
        (0, None, {0}),
        (255, None, {0, 255}),
    ],
)
def test_transparent_parts_contrast_with_the_rest(
    tmp_path: Path, suffix: str, stroke: int, alpha: int | None, expected: set[int]
) -> None:
    """A pixel of a transparent background is black; None is no transparency, of which all bytes are 0."""
    pixels = np.zeros((28, 28, 4), np.uint8)
    pixels[3:9, 3:9] = [stroke, stroke, stroke, alpha or 0]
    save(tmp_path / "a" / f"rgba.{suffix}", pixels)
    save(tmp_path / "b" / "c.png", np.full((28, 28), 7, np.uint8))
    if suffix == "png":
        save(tmp_path / "a" / "two.png", pixels[..., 2:])
    for image, label in custom_data.images.read(custom_data.images.find(tmp_path))["train"]:
        assert set(image) == ({7} if label else expected)


@given(
    st.lists(st.tuples(st.binary(min_size=2, max_size=2), st.integers(0, 9)), min_size=2, max_size=60), st.floats(0.01, 0.99)
)
def test_no_image_is_in_both_splits(examples: list[tuple[bytes, int]], share: float) -> None:
    different = {image for image, _ in examples}
    if len(different) < 2:
        with pytest.raises(InputError, match="all images are the same"):
            custom_data.split_off(examples, share)
        return
    splits = custom_data.split_off(examples, share)
    assert sorted(splits["train"] + splits["test"]) == sorted(examples)
    images = {name: {image for image, _ in split} for name, split in splits.items()}
    assert images["train"]
    assert images["test"]
    assert not images["train"] & images["test"]
    assert abs(len(images["test"]) - share * len(different)) <= 1
    assert {name: sorted(split) for name, split in custom_data.split_off(examples[::-1], share).items()} == {
        name: sorted(split) for name, split in splits.items()
    }


_rows = st.lists(st.tuples(st.integers(0, 9), st.binary(min_size=PIXELS, max_size=PIXELS)), min_size=1, max_size=4)


@settings(max_examples=30)
@given(_rows, st.booleans(), st.sampled_from(["\n", "\r\n"]), st.sampled_from(["", '"', " "]), st.booleans())
def test_csv_is_read_in_any_dialect(
    tmp_path_factory: pytest.TempPathFactory, rows: Any, header: bool, end: str, around: str, mark: bool
) -> None:
    lines = [["label", *(f"pixel{number}" for number in range(PIXELS))]] if header else []
    lines += [[f"{around}{value}{around}" for value in (label, *pixels)] for label, pixels in rows]
    path = tmp_path_factory.getbasetemp() / "written.csv"
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + "".join(",".join(line) + end for line in lines).encode())
    assert custom_data.read_csv(path) == [(pixels, label) for label, pixels in rows]


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_invalid_csv_is_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "none.csv"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        custom_data.read_csv(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([csv_row(1, [0] * 783)], ":2 has 784 columns; valid are 785, a label and 784 pixels"),
        ([csv_row(1, [0] * 784), "", csv_row(10, [0] * 784)], ":4 has the label '10'; valid are 0 to 9"),
        ([csv_row("cat", [0] * 784)], ":2 has the label 'cat'; valid are 0 to 9"),
        ([csv_row(1, [0, 256, *[0] * 782])], ":2 has '256' in column 3; valid are whole numbers of 0 to 255"),
        ([csv_row(1, [0] * 783 + [0.5])], ":2 has '0.5' in column 785; valid are whole numbers of 0 to 255"),
        ([], " holds no images"),
        ([csv_row(1, [0] * 784), csv_row(1, [1] * 784)], " holds one class only: two or more are needed"),
    ],
)
def test_csv_errors(tmp_path: Path, lines: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text("\n".join([csv_row("label", range(PIXELS)), *lines]))
    assert records.main(["--source", str(path), "--dest", str(tmp_path / "dest")]) == 2
    assert capsys.readouterr().err == f"error: {path}{message}\n"
    assert not (tmp_path / "dest").exists()


def test_csv_with_both_splits(tmp_path: Path) -> None:
    train, test = tmp_path / "train.csv", tmp_path / "test.csv"
    train.write_text("\n".join(csv_row(number, [number] * PIXELS) for number in range(10)))
    test.write_text(csv_row(3, [33] * PIXELS))
    splits, classes = custom_data.load(custom_data.paths(f"{train},{test}"), 0.1)
    assert classes == [str(number) for number in range(10)]
    assert image_label_pairs(splits["test"]) == [(bytes([33] * PIXELS), 3)]
    assert len(splits["train"].labels) == 10


def classes(top: Path, *names: str) -> None:
    for number, name in enumerate(names):
        save(top / name / "0.png", gray_image(number))


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda top: None, "{top} has no folders of images; valid are <class>/*.png, jpg or bmp, in train/ and test/ or not"),
        (lambda top: classes(top, "a"), "{top} holds one class only, a: two or more are needed"),
        (lambda top: classes(top, *"abcdefghijk"), "{top} holds 11 classes; the models distinguish 10 at most"),
        (lambda top: (classes(top, "a"), (top / "b").mkdir()), "{top}/b holds no image; valid are png, jpg and bmp"),
        (
            lambda top: classes(top, "train/a", "train/b", "test/a", "test/c"),
            "{top}/test has the class c, which is not in train",
        ),
        (
            lambda top: (classes(top, "a", "b"), (top / "b" / "broken.jpg").write_bytes(b"\xff\xd8\xff")),
            "{top}/b/broken.jpg cannot be decoded; valid are png, jpg and bmp",
        ),
        (
            lambda top: (classes(top, "a", "b"), (top / "a" / "1.png").write_text("text")),
            "{top}/a/1.png cannot be decoded; valid are png, jpg and bmp",
        ),
    ],
)
def test_folder_errors(
    tmp_path: Path, prepare: Callable[[Path], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    top = tmp_path / "pictures"
    top.mkdir()
    prepare(top)
    assert records.main(["--source", str(top), "--dest", str(tmp_path / "dest")]) == 2
    assert capsys.readouterr().err == f"error: {message.format(top=top)}\n"
