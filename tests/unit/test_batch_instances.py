"""Instances as lines and records, and the results of a model that refuses some of them."""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hosts.batch.inference import BATCH, ShardPredictor
from hosts.batch.inputs import detect_kind
from hosts.batch.instances import parse_line, parse_record
from hosts.serving.rest import Arrays, RestError, parse_request, prediction_rows
from jobs.model_signatures import Signature, Tensor
from scaletier.tensorflow_setup import import_tensorflow

tf = import_tensorflow()
IMAGE = Signature({"key": Tensor("int64", (None,)), "image": Tensor("float32", (None, 4))}, {})


def record(**features: Any) -> bytes:
    """Return a tf.train.Example, of bytes, floats or whole numbers."""
    kinds = {bytes: ("bytes_list", tf.train.BytesList), float: ("float_list", tf.train.FloatList)}
    encoded = {}
    for name, values in features.items():
        kind, wrap = kinds.get(type(values[0]), ("int64_list", tf.train.Int64List))
        encoded[name] = tf.train.Feature(**{kind: wrap(value=values)})
    content: bytes = tf.train.Example(features=tf.train.Features(feature=encoded)).SerializeToString(deterministic=True)
    return content


def arrays(signature: Signature, *records: bytes) -> dict[str, Any]:
    """Return the model's inputs."""
    instances = [parse_record(each, signature, 40 + place) for place, each in enumerate(records)]
    return {name: array.tolist() for name, array in parse_request({"instances": instances}, signature)[0].items()}


def test_features_are_inputs_by_name() -> None:
    inputs = arrays(IMAGE, record(key=[7], image=[0.5, 1.0, 0.0, 0.25], label=[3]), record(key=[8], image=[1, 2, 3, 4]))
    assert inputs == {"key": [7, 8], "image": [[0.5, 1.0, 0.0, 0.25], [1.0, 2.0, 3.0, 4.0]]}


def test_images_in_the_format_of_make_data() -> None:
    inputs = arrays(IMAGE, record(image_raw=[b"\x00\xff\x33\x00"], label=[3]), record(image_raw=[bytes(4)]))
    assert inputs["key"] == [40, 41], "the record's number is its key if it has none"
    assert inputs["image"] == [[0.0, 1.0, pytest.approx(0.2), 0.0], [0.0] * 4]
    for dtype in ("bfloat16", "float16", "float64"):
        floats = Signature({"image": Tensor(dtype, (None, 2))}, {})
        assert arrays(floats, record(image_raw=[b"\x00\xff"])) == {"image": [[0.0, 1.0]]}
    integers = Signature({"image": Tensor("int32", (None, 2, 2))}, {})
    assert arrays(integers, record(image_raw=[b"\x00\xff\x33\x01"])) == {"image": [[[0, 255], [51, 1]]]}


def test_raw_values_that_are_not_one_text_are_used_as_they_are() -> None:
    assert arrays(IMAGE, record(image_raw=[1, 2, 3, 4]))["image"] == [[1.0, 2.0, 3.0, 4.0]]
    one = Signature({"image": Tensor("float32", (None, 1))}, {})
    assert arrays(one, record(image_raw=[7])) == {"image": [[7.0]]}
    with pytest.raises(RestError, match="input image must be numbers"):
        arrays(IMAGE, record(image_raw=[b"ab", b"cd"]))


@pytest.mark.parametrize(("dtype", "takes"), [("int32", True), ("uint8", True), ("float32", False), (None, False)])
def test_a_record_s_number_is_the_key_of_whole_numbers(dtype: str | None, takes: bool) -> None:
    signature = Signature({"key": Tensor(dtype, (None,)), "x": Tensor("float32", (None,))}, {})
    if takes:
        assert parse_record(record(x=[0.5]), signature, 40) == {"key": 40, "x": 0.5}
    else:
        with pytest.raises(RestError, match=r"^has the features x; this signature takes key, x$"):
            parse_record(record(x=[0.5]), signature, 40)
    predictor = ShardPredictor(DoublingModel().run, {"serving_default": signature}, "serving_default")
    assert predictor.takes_key == takes
    assert not ShardPredictor(DoublingModel().run, DoublingModel().signatures, "serving_default").takes_key


@pytest.mark.parametrize(
    ("shape", "values", "expected"),
    [
        (None, [1.0, 2.0], [1.0, 2.0]),
        ((None, None), [1.0, 2.0], [1.0, 2.0]),
        ((None,), [1.0], 1.0),
        ((None, None, 2), [1.0, 2.0, 3.0, 4.0], [[1.0, 2.0], [3.0, 4.0]]),
        ((None, 2, 1), [1.0, 2.0], [[1.0], [2.0]]),
        ((None, None, None), [1.0, 2.0], [1.0, 2.0]),
        ((None, 0), [1.0], [1.0]),
        ((None, 2), [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]),
    ],
)
def test_features_get_the_shape_of_the_input(shape: Any, values: list[float], expected: Any) -> None:
    """Values that do not fit stay flat, and the server refuses them."""
    instance = parse_record(record(x=values), Signature({"x": Tensor("float32", shape)}, {}), 0)
    assert np.asarray(instance["x"]).tolist() == expected


def test_an_empty_feature_is_an_empty_row() -> None:
    signature = Signature({"n": Tensor("int64", (None, None)), "x": Tensor("float32", (None, None, 2))}, {})
    one = tf.train.Example(features=tf.train.Features(feature={"n": tf.train.Feature(), "x": tf.train.Feature()}))
    inputs = parse_request({"instances": [parse_record(one.SerializeToString(), signature, 0)]}, signature)[0]
    assert {name: (array.shape, array.dtype) for name, array in inputs.items()} == {
        "n": ((1, 0), np.int64),
        "x": ((1, 0, 2), np.float32),
    }


def test_texts_and_serialized_examples() -> None:
    texts = Signature({"word": Tensor(None, (None, 2)), "n": Tensor("int64", (None, None))}, {})
    assert arrays(texts, record(word=[b"a", b"\xff"], n=[1, 2])) == {"word": [[b"a", b"\xff"]], "n": [[1, 2]]}
    serialized = Signature({"examples": Tensor(None, (None,))}, {})
    one = record(x=[1.0])
    assert arrays(serialized, one) == {"examples": [one]}
    assert arrays(serialized, record(examples=[b"a"])) == {"examples": [b"a"]}
    with pytest.raises(RestError, match=r"^has the features y; this signature takes x$"):
        arrays(Signature({"x": Tensor("float32", (None,))}, {}), record(y=[1.0]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (record(label=[3], pixels=[1.0]), "has the features label, pixels; this signature takes image, key"),
        (record(), "has no features; this signature takes image, key"),
        (record(image=[1.0]), "input image has the shape [1, 1], and must have [?, 4]"),
        (record(image_raw=[bytes(5)]), "input image has the shape [1, 5], and must have [?, 4]"),
        (record(image=[b"text"]), "input image must be numbers"),
        (b"\xff\xff", "is no tf.train.Example"),
    ],
)
def test_a_record_that_does_not_fit_the_signature_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(RestError, match=re.escape(message)):
        arrays(IMAGE, content)


def test_a_line_is_a_json_value() -> None:
    assert parse_line(b'{"x": [1, 2]}', IMAGE) == {"x": [1, 2]}
    for line in (b"{", b"NaN", b"\xff"):
        with pytest.raises(RestError, match="is no JSON"):
            parse_line(line, IMAGE)


def test_a_line_of_text_is_the_only_input_of_strings() -> None:
    words = Signature({"word": Tensor(None, (None,))}, {})
    lines = (b"a good film", b'"quoted"', b'{"word": "named"}', b"it's 5 > 3", b"\xff", b"2020", b"1.50", b"true", b"null")
    inputs = [parse_request({"instances": [parse_line(line, words)]}, words)[0]["word"].tolist() for line in lines]
    assert inputs == [
        [b"a good film"],
        [b"quoted"],
        [b"named"],
        [b"it's 5 > 3"],
        [b"\xff"],
        [b"2020"],
        [b"1.50"],
        [b"true"],
        [b"null"],
    ]
    two = Signature({"word": Tensor(None, (None,)), "other": Tensor(None, (None,))}, {})
    with pytest.raises(RestError, match="is no JSON"):
        parse_line(b"a good film", two)


@pytest.mark.parametrize("lines", [b'{"x": 1}\n', b"1\n", b"", "é".encode()])
def test_the_kind_of_a_file_is_detected_from_its_content(lines: bytes) -> None:
    records = (784).to_bytes(8, "little") + b"crc." + bytes(784)
    assert (detect_kind(lines), detect_kind(gzip.compress(lines))) == ((False, False), (False, True))
    assert (detect_kind(records), detect_kind(gzip.compress(records))) == ((True, False), (True, True))
    with pytest.raises(ValueError, match="its gzip data is damaged"):
        detect_kind(b"\x1f\x8b\xff\xff")


class DoublingModel:
    """A model that doubles x, refuses negative values, and records its batch sizes."""

    def __init__(self, by_rows: bool = True) -> None:
        output = Tensor("float32", (None,) if by_rows else None)
        self.signatures = {"serving_default": Signature({"x": Tensor("float32", (None,))}, {"y": output})}
        self.batch_sizes: list[int] = []

    def run(self, signature: str, inputs: Arrays) -> Arrays:
        self.batch_sizes.append(len(inputs["x"]))
        if (inputs["x"] < 0).any():
            raise RestError(400, "the model refuses the input: it is negative")
        return {"y": 2 * inputs["x"]}


def predict_shard(model: DoublingModel, values: list[Any]) -> tuple[list[float], list[dict[str, Any]]]:
    """Return the results and the errors of a shard of lines."""
    errors: list[dict[str, Any]] = []
    lines = [value if isinstance(value, bytes) else json.dumps({"x": value}).encode() for value in values]
    predictor = ShardPredictor(model.run, model.signatures, "serving_default")
    return [json.loads(line) for line in predictor.predict(iter(lines), True, 0, errors)], errors


@given(st.lists(st.integers(-1, 9), max_size=300))
def test_a_refused_instance_does_not_affect_the_others(values: list[int]) -> None:
    results, errors = predict_shard(DoublingModel(), values)
    assert results == [2.0 * value for value in values if value >= 0]
    assert [error["line"] for error in errors] == [line for line, value in enumerate(values, 1) if value < 0]


def test_errors_have_a_reason() -> None:
    results, errors = predict_shard(DoublingModel(), [1, b"{", b"  ", -1, "text", 2])
    assert results == [2.0, 4.0]
    assert [error["line"] for error in errors] == [2, 4, 5]
    messages = [str(error["error"]) for error in errors]
    assert messages[0].startswith("is no JSON: ")
    assert messages[1:] == ["the model refuses the input: it is negative", "input x must be numbers, all rows of one length"]


def test_a_model_that_takes_rows_gets_batches() -> None:
    model = DoublingModel()
    predict_shard(model, [1] * (2 * BATCH + 3))
    assert model.batch_sizes == [BATCH, BATCH, 3]
    single = DoublingModel(by_rows=False)
    assert predict_shard(single, [1, 2, 3])[0] == [2.0, 4.0, 6.0]
    assert single.batch_sizes == [1, 1, 1]


def test_a_batch_too_large_for_the_memory_is_halved() -> None:
    class LimitedModel(DoublingModel):
        most = 40

        def run(self, signature: str, inputs: Arrays) -> Arrays:
            if len(inputs["x"]) > self.most:
                raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")
            return super().run(signature, inputs)

    model = LimitedModel()
    assert predict_shard(model, [1, 2] * (BATCH // 2)) == ([2.0, 4.0] * (BATCH // 2), [])
    assert model.batch_sizes == [BATCH // 4] * 4
    model.most = 0
    with pytest.raises(tf.errors.ResourceExhaustedError):
        predict_shard(model, [1, 2])


def test_outputs_without_a_row_per_instance_are_errors() -> None:
    class FiveRowModel(DoublingModel):
        def run(self, signature: str, inputs: Arrays) -> Arrays:
            return {"y": np.zeros(5, np.float32)}

    results, errors = predict_shard(FiveRowModel(), [1, 2])
    assert results == []
    assert [error["error"] for error in errors] == ["the outputs of this signature have 5 rows for 1 instances"] * 2


def test_a_float_changes_no_whole_number_of_its_batch() -> None:
    model = DoublingModel()
    model.signatures = {"serving_default": Signature({"x": Tensor("int64", (None,))}, {"y": Tensor("int64", (None,))})}
    results, errors = predict_shard(model, [2**53 + 1, 1.0, 2**53 + 3])
    assert (results, errors) == ([2**54 + 2, 2, 2**54 + 6], [])


def test_results_of_bfloat16_may_be_nan() -> None:
    assert prediction_rows({"y": np.array([0.5, np.nan, -np.inf], "bfloat16")}, 3) == [b"0.5", b"NaN", b"-Infinity"]


def test_an_unknown_signature_is_refused() -> None:
    with pytest.raises(RestError, match="there is no signature 'other'; there are serving_default"):
        ShardPredictor(DoublingModel().run, DoublingModel().signatures, "other")
