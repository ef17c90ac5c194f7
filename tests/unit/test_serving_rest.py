"""TensorFlow Serving's REST API: requests and answers, compared with its documentation."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
import pytest

from hosts.serving import rest
from hosts.serving.rest import RestError
from jobs.model_signatures import Signature, Tensor

ONE = Signature({"x": Tensor("float32", (None, 2))}, {"y": Tensor("float32", (None,))})
FLAG = Signature({"flag": Tensor("bool", (None,))}, {})
BYTE = Signature({"byte": Tensor("uint8", (None,))}, {})
ANY_TEXT = Signature({"text": Tensor(None, None)}, {})
HASH = Signature({"hash": Tensor("uint64", (None,))}, {})
RAGGED = Signature({"x": Tensor("int64", (None, None))}, {})
TWO = Signature({"key": Tensor("int64", (None,)), "text": Tensor(None, (None,))}, {"y": Tensor("float32", (None,))})


def nested(depth: int, text: Any = "a") -> Any:
    """Return a text in that many lists."""
    return [nested(depth - 1, text)] if depth else text


def parse(body: Any, signature: Signature = ONE) -> tuple[dict[str, Any], bool]:
    arrays, by_rows = rest.parse_request(rest.body_of(json.dumps(body).encode()), signature)
    return {name: array.tolist() for name, array in arrays.items()}, by_rows


@pytest.mark.parametrize(
    ("body", "signature", "arrays", "by_rows"),
    [
        ({"instances": [[1, 2], [3, 4]]}, ONE, {"x": [[1, 2], [3, 4]]}, True),
        ({"instances": [{"x": [1, 2]}]}, ONE, {"x": [[1, 2]]}, True),
        ({"inputs": [[1, 2]]}, ONE, {"x": [[1, 2]]}, False),
        ({"inputs": {"x": [[1, 2]]}}, ONE, {"x": [[1, 2]]}, False),
        ({"instances": [{"key": 7, "text": "é"}]}, TWO, {"key": [7], "text": ["é".encode()]}, True),
        ({"inputs": {"key": [1, 2], "text": ["a", {"b64": "/w=="}]}}, TWO, {"key": [1, 2], "text": [b"a", b"\xff"]}, False),
        (
            {"instances": [{"b64": "AAE="}]},
            Signature({"image_bytes": Tensor(None, (None,))}, {}),
            {"image_bytes": [b"\x00\x01"]},
            True,
        ),
        ({"instances": [{"key": 3.0, "text": "a"}]}, TWO, {"key": [3], "text": [b"a"]}, True),
        ({"inputs": {"b64": "AAE="}}, Signature({"x": Tensor(None, ())}, {}), {"x": b"\x00\x01"}, False),
        (
            {"inputs": [{"b64": "AAEA\nAAE=\n"}, {"b64": "AA E"}, {"b64": ""}]},
            ANY_TEXT,
            {"text": [b"\0\1\0\0\1", b"\0\1", b""]},
            False,
        ),
        ({"inputs": {"key": [2**53 + 1, 1], "text": ["a", "b"]}}, TWO, {"key": [2**53 + 1, 1], "text": [b"a", b"b"]}, False),
        ({"inputs": {"key": [2**53 - 1, 1.0], "text": ["a", "b"]}}, TWO, {"key": [2**53 - 1, 1], "text": [b"a", b"b"]}, False),
        ({"inputs": {"x": [[1, 2]], "extra": "a"}}, ONE, {"x": [[1, 2]]}, False),
        ({"inputs": [2**63, 1]}, HASH, {"hash": [2**63, 1]}, False),
        ({"inputs": [2**64 - 1, 0]}, HASH, {"hash": [2**64 - 1, 0]}, False),
        ({"instances": [[], []]}, RAGGED, {"x": [[], []]}, True),
        ({"inputs": [True, 0, 1]}, FLAG, {"flag": [True, False, True]}, False),
        ({"inputs": [0, 255]}, BYTE, {"byte": [0, 255]}, False),
        ({"inputs": nested(32)}, ANY_TEXT, {"text": nested(32, b"a")}, False),
    ],
)
def test_a_request_is_parsed(body: Any, signature: Signature, arrays: dict[str, Any], by_rows: bool) -> None:
    assert parse(body, signature) == (arrays, by_rows)


@pytest.mark.parametrize(
    ("body", "signature", "message"),
    [
        ([1], ONE, "the request must be a JSON object with instances, or inputs"),
        ({}, ONE, "the request must have either instances (rows) or inputs (columns)"),
        ({"instances": [[1, 2]], "inputs": []}, ONE, "either instances (rows) or inputs (columns)"),
        ({"instances": []}, ONE, "instances must be a list with one instance or more"),
        ({"instances": "x"}, ONE, "instances must be a list with one instance or more"),
        ({"instances": [[1, 2, 3]]}, ONE, "input x has the shape [1, 3], and must have [?, 2]"),
        ({"instances": [[1, 2], [3]]}, ONE, "input x must be numbers, all rows of one length"),
        ({"instances": [["a", "b"]]}, ONE, "input x must be numbers"),
        ({"inputs": {"key": [1], "text": ["a", ["b", "c"]]}}, TWO, "input text must be strings, all rows of one length"),
        ({"inputs": [["b"], ["b", "c"]]}, ANY_TEXT, "input text must be strings, all rows of one length"),
        ({"instances": [[None, 1]]}, ONE, "input x must be numbers"),
        ({"inputs": []}, ONE, "input x has the shape [0], and must have [?, 2]"),
        ({"instances": [[], [1]]}, RAGGED, "input x must be numbers, all rows of one length"),
        ({"instances": [{"z": 1}]}, TWO, "the instance has z; this signature takes key, text"),
        ({"instances": [{"key": 1, "text": "a"}, 5]}, TWO, "instance 1 has no object; this signature takes key, text"),
        ({"instances": [{"x": [1, 2], "z": 1}]}, ONE, "the instance has x, z; this signature takes x"),
        ({"instances": [1]}, TWO, "an instance must be an object with key, text"),
        ({"inputs": {"key": [1]}}, TWO, "inputs has key; this signature takes key, text"),
        ({"instances": [{"key": 1.5, "text": "a"}]}, TWO, "input key must be whole numbers"),
        (
            {"inputs": {"key": [2**53 + 1, 1.0], "text": ["a", "b"]}},
            TWO,
            "input key has numbers that a float cannot hold exactly",
        ),
        ({"inputs": {"key": [-(2**53) - 1, 1.0], "text": ["a", "b"]}}, TWO, "write all without point or exponent"),
        ({"instances": [{"key": 1, "text": 5}]}, TWO, "input text must be strings"),
        ({"instances": [{"key": 1, "text": {"b64": "?"}}]}, TWO, "b64 is no base64"),
        ({"instances": [{"key": 2**70, "text": "a"}]}, TWO, "input key must be whole numbers from -9223372036854775808 to"),
        ({"inputs": nested(33)}, ANY_TEXT, "input text must have at most 32 dimensions, the limit for strings"),
        ({"instances": [["1", "2"]]}, ONE, "input x must be numbers, all rows of one length"),
        ({"instances": [{}]}, TWO, "the instance has nothing; this signature takes key, text"),
        ({"instances": [{"b64": "AAE="}]}, TWO, "the instance has b64; this signature takes key, text"),
        ({"inputs": {}}, TWO, "inputs has nothing; this signature takes key, text"),
        ({"inputs": {"b64": "AAE="}}, TWO, "inputs has b64; this signature takes key, text"),
        ({"inputs": [256]}, BYTE, "input byte must be whole numbers from 0 to 255"),
        ({"inputs": [-1]}, BYTE, "input byte must be whole numbers from 0 to 255"),
        ({"instances": [{"key": 1, "text": {"b64": "AA*E="}}]}, TWO, "b64 is no base64"),
        *(({"inputs": [{"b64": bad}]}, ANY_TEXT, "b64 is no base64") for bad in ("A", "AA==AA==", "AA-_", "é", 1, ["AA=="])),
        ({"inputs": [2**63, -1]}, HASH, "input hash must be whole numbers from 0 to 18446744073709551615"),
        ({"inputs": [2**63, 1.0]}, HASH, "input hash has numbers that a float cannot hold exactly"),
        ({"inputs": {"key": [2**63, 1], "text": ["a", "b"]}}, TWO, "input key must be whole numbers from -9223372036854775808"),
        ({"inputs": [2]}, FLAG, "input flag must be true or false"),
        ({"instances": [[1e300, 1]]}, ONE, "input x has a number that is too large for float32"),
    ],
)
def test_an_invalid_request_is_refused(body: Any, signature: Signature, message: str) -> None:
    with pytest.raises(RestError) as caught:
        parse(body, signature)
    assert message in str(caught.value)
    assert caught.value.status == 400


@pytest.mark.parametrize("content", [b"{", b"NaN", b'{"instances": [NaN]}', b"\xff", b""])
def test_invalid_json_is_refused(content: bytes) -> None:
    with pytest.raises(RestError, match="the request is no JSON"):
        rest.body_of(content)


def test_an_answer_by_rows_and_by_columns() -> None:
    outputs = {"a": np.array([1, 2], np.int64), "b": np.array([[0.5], [0.25]], np.float32)}
    assert json.loads(rest.predict_response(outputs, True)) == {"predictions": [{"a": 1, "b": [0.5]}, {"a": 2, "b": [0.25]}]}
    assert json.loads(rest.predict_response(outputs, False)) == {"outputs": {"a": [1, 2], "b": [[0.5], [0.25]]}}
    assert json.loads(rest.predict_response({"b": outputs["b"]}, True)) == {"predictions": [[0.5], [0.25]]}
    assert json.loads(rest.predict_response({"b": outputs["b"]}, False)) == {"outputs": [[0.5], [0.25]]}
    assert rest.predict_response({}, False) == b'{"outputs":{}}'
    for odd in ({"a": np.zeros(2), "b": np.zeros(())}, {"a": np.zeros(2), "b": np.zeros(3)}, {"a": np.zeros(())}):
        with pytest.raises(RestError, match="have not one row for each instance"):
            rest.predict_response(odd, True)


def test_an_answer_with_strings_bytes_and_nan() -> None:
    texts = {"label": np.array([b"cat"], object), "image_bytes": np.array([b"\xff"], object)}
    assert json.loads(rest.predict_response(texts, True)) == {"predictions": [{"label": "cat", "image_bytes": {"b64": "/w=="}}]}
    for kind in ("S", "U"):
        assert rest.predict_response({"y": np.array(["cat"], kind)}, True) == b'{"predictions":["cat"]}'
    assert rest.predict_response({"y": np.array([np.nan, np.inf, 1.0])}, True) == b'{"predictions":[NaN,Infinity,1.0]}'


def test_classify_requests_and_answers() -> None:
    body = {"context": {"a": 1}, "examples": [{"b": 2}, {"a": 3, "b": 4}]}
    assert rest.examples(body) == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    scores = np.array([[0.25, 0.75]])
    assert json.loads(rest.classify_response({"scores": scores, "classes": np.array([1])})) == {
        "results": [[["0", 0.25], ["1", 0.75]]]
    }
    assert rest.classify_response({"probabilities": scores}) == b'{"results":[[["0",0.25],["1",0.75]]]}'
    named = {"scores": scores, "classes": np.array([[b"no", b"yes"]], object)}
    assert json.loads(rest.classify_response(named)) == {"results": [[["no", 0.25], ["yes", 0.75]]]}
    for wrong in ({"examples": []}, {"examples": [1]}, {"examples": [{}], "context": 1}):
        with pytest.raises(RestError, match="examples must be a list of objects"):
            rest.examples(wrong)
    assert [rest.copied_bytes({**body, "context": context}) for context in ({"a": [1, 2]}, {})] == [2 * len('{"a":[1,2]}'), 0]
    nested = orjson.loads("[" * 300 + "]" * 300)
    with pytest.raises(RestError, match="context has lists that are nested too deep"):
        rest.copied_bytes({"examples": [{}], "context": {"a": nested}})
    with pytest.raises(
        RestError, match=r"an output scores or probabilities of the shape \[examples, classes\]; this signature has y"
    ):
        rest.classify_response({"y": np.zeros(3)})
    with pytest.raises(
        RestError, match=r"an output scores or probabilities of the shape \[examples, classes\]; this signature has scores"
    ):
        rest.classify_response({"scores": np.zeros(3)})


def test_signatures_are_described() -> None:
    assert rest.get_signature({"serving_default": ONE}, rest.signature_name({})) is ONE
    with pytest.raises(RestError, match=r"there is no signature 'x'; there are serving_default$"):
        rest.get_signature({"serving_default": ONE}, rest.signature_name({"signature_name": "x"}))
    assert rest.signature_name({"signature_name": ""}) == "serving_default"
    with pytest.raises(RestError, match=r"there is no signature 'x'; there are none$"):
        rest.get_signature({}, "x")
    with pytest.raises(RestError, match="signature_name must be a string"):
        rest.signature_name({"signature_name": 1})
    assert ONE.batchable
    assert not Signature({"x": Tensor("float32", (2,))}, ONE.outputs).batchable
    assert not Signature({"x": Tensor("float32", None)}, ONE.outputs).batchable
    assert not Signature({"x": Tensor("float32", ())}, ONE.outputs).batchable
    assert not Signature({}, ONE.outputs).batchable


def test_the_outputs_of_a_batch_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked, isfinite = list[int](), np.isfinite
    monkeypatch.setattr(np, "isfinite", lambda array: checked.append(len(array)) or isfinite(array))  # type: ignore[func-returns-value]
    assert rest.prediction_rows({"y": np.array([0.5, np.nan, 1.5])}, 3) == [b"0.5", b"NaN", b"1.5"]
    assert checked == [3]


def test_lines_are_single_predictions_and_equal_in_every_process() -> None:
    outputs = {"y": np.array([0.5, 1.5], np.float32), "a": np.array([1, 2])}
    assert rest.prediction_rows(outputs, 2) == [b'{"a":1,"y":0.5}', b'{"a":2,"y":1.5}']
    assert rest.prediction_rows({"y": np.array([[1, 2]])}, 1) == [b"[1,2]"]
    with pytest.raises(RestError, match="the outputs of this signature have 2 rows for 3 instances"):
        rest.prediction_rows(outputs, 3)
