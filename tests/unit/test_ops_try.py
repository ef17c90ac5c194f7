"""`fab try` without a host and without a browser: who is answered, what the model server is asked, and what is refused."""

from __future__ import annotations

import json
import re
import socket
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_for

from jobs.folder import Folder
from jobs.ledger import Ledger
from ops.cluster.cluster import Cluster
from ops.cluster.inventory import Inventory
from ops.errors import HostError, OpsError, UsageError
from ops.models import drawing, reach, trying
from ops.models.drawing import Question
from ops.models.known import catalog_of
from ops.models.site import Handler, Site, SiteServer
from serving.records import Model, Version, VersionState

PORT = 8700
HERE = {"host": f"127.0.0.1:{PORT}"}
POST = HERE | {"content-type": "application/json", "content-length": "5000"}
TEN = [0.0, 0.0, 0.0, 0.9, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0]
BLANK = json.dumps([0] * 784).encode()


def tensor(dtype: str, *sizes: int) -> dict[str, Any]:
    return {"dtype": dtype, "tensor_shape": {"dim": [{"size": str(size), "name": ""} for size in sizes], "unknown_rank": False}}


IMAGE, KEY, PROBABILITIES = tensor("DT_FLOAT", -1, 784), tensor("DT_INT64", -1), tensor("DT_FLOAT", -1, 10)
ANYTHING = {"dtype": "DT_FLOAT", "tensor_shape": {"unknown_rank": True}}


def metadata(inputs: dict[str, Any], outputs: dict[str, Any], version: str = "v1") -> dict[str, Any]:
    signatures = {"serving_default": {"inputs": inputs, "outputs": outputs}}
    return {"model_spec": {"version": version}, "metadata": {"signature_def": {"signature_def": signatures}}}


MNIST = metadata({"image": IMAGE, "key": KEY}, {"classes": KEY, "scores": PROBABILITIES, "probabilities": PROBABILITIES})
PRICES = metadata({"rooms": tensor("DT_INT32", -1, 3), "text": ANYTHING}, {"price": tensor("DT_FLOAT", -1)})


class FakeServer:
    """A model server: what each path is answered, and what was asked."""

    def __init__(self, answers: dict[str, tuple[int, Any]]) -> None:
        self.answers, self.asked = answers, list[tuple[str, str, Any]]()
        self.ends: BaseException = HostError("master-0", "does not answer")
        """What comes of the first look whether the connection is still there."""

    def bring(self) -> None:
        """Nothing is missing."""

    def settle(self) -> None:
        """The page is shown."""

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        if path == reach.HEALTH:
            raise self.ends
        self.asked.append((method, path, json.loads(body) if body else None))
        if path not in self.answers:
            raise OpsError(f"the model server on master-0 does not answer: {path}")
        return self.answers[path]


def states(*versions: tuple[str, str]) -> tuple[int, Any]:
    return 200, {"model_version_status": [{"version": name, "state": state} for name, state in versions]}


@pytest.fixture
def fake() -> FakeServer:
    """Model `m`: v1 of digits, v2 of prices, v3 that is not loaded yet."""
    where = "/v1/models/m"
    return FakeServer(
        {
            where: states(("v1", "AVAILABLE"), ("v2", "AVAILABLE"), ("v3", "LOADING")),
            f"{where}/metadata": (200, MNIST),
            f"{where}/versions/v1/metadata": (200, MNIST),
            f"{where}/versions/v2/metadata": (200, PRICES),
            f"{where}/versions/v3/metadata": (503, {"error": "model m is not loaded yet"}),
            f"{where}/versions/v1:predict": (200, {"predictions": [{"probabilities": TEN, "scores": [], "classes": 3}]}),
        }
    )


@pytest.fixture
def site(fake: FakeServer) -> Site:
    return Site("m", fake.ask, {"/": ("text/html", b"<page>")}, PORT)


@pytest.mark.parametrize(
    ("inputs", "outputs", "question"),
    [
        (
            {"image": IMAGE, "key": KEY},
            {"scores": PROBABILITIES, "probabilities": PROBABILITIES},
            ("image", "key", "probabilities"),
        ),
        ({"x": IMAGE}, {"y": PROBABILITIES}, ("x", None, "y")),
        ({"x": IMAGE}, {"a": PROBABILITIES, "scores": PROBABILITIES}, ("x", None, "scores")),
        ({"x": IMAGE, "z": KEY, "key": KEY}, {"y": PROBABILITIES}, None),
        ({"x": IMAGE, "other": IMAGE}, {"y": PROBABILITIES}, None),
        ({"x": IMAGE, "rate": tensor("DT_FLOAT", -1)}, {"y": PROBABILITIES}, None),
        ({"x": tensor("DT_UINT8", -1, 784)}, {"y": PROBABILITIES}, None),
        ({"x": tensor("DT_FLOAT", -1, 785)}, {"y": PROBABILITIES}, None),
        ({"x": ANYTHING}, {"y": PROBABILITIES}, None),
        ({"key": KEY}, {"y": PROBABILITIES}, None),
        ({"x": IMAGE}, {"y": tensor("DT_FLOAT", -1, 9)}, None),
        ({"x": IMAGE}, {"classes": tensor("DT_INT64", -1, 10)}, None),
    ],
)
def test_which_models_take_a_drawing(inputs: Any, outputs: Any, question: tuple[str, str | None, str] | None) -> None:
    assert drawing.question_of(metadata(inputs, outputs)) == (Question(*question) if question else None)


def test_a_model_without_the_signature_takes_none() -> None:
    mute: dict[str, Any] = {"metadata": {"signature_def": {"signature_def": {}}}}
    assert drawing.question_of(mute) is None
    assert drawing.told(mute) == "has no signature serving_default"


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"p": TEN}, TEN),
        (TEN, TEN),
        ([0.0] * 9 + [1], [0.0] * 9 + [1.0]),
        ([1000.0, 1000.0] + [0.0] * 8, [0.5, 0.5] + [0.0] * 8),
    ],
)
def test_probabilities(row: Any, found: list[float]) -> None:
    assert drawing.probabilities(Question("image", None, "p"), {"predictions": [row]}) == found


def test_a_drawing_is_asked_by_the_names_of_the_signature(site: Site, fake: FakeServer) -> None:
    image = [0, 1, 0.5, *([0] * 781)]
    answer = site.answer("POST", "/predict/v1", json.dumps(image).encode())
    found = json.loads(answer.content)
    assert (answer.status, found.pop("milliseconds") >= 0, found) == (200, True, {"probabilities": TEN})
    assert fake.asked[-1] == ("POST", "/v1/models/m/versions/v1:predict", {"instances": [{"image": image, "key": 0}]})
    assert drawing.asked(Question("x", None, "y"), [1.0]) == b'{"instances": [{"x": [1.0]}]}'


def test_the_states(site: Site, fake: FakeServer) -> None:
    answer = site.answer("GET", "/states", b"")
    versions = [{"name": "v1", "draws": True}, {"name": "v2", "draws": False}]
    assert (answer.status, json.loads(answer.content)) == (200, {"default": "v1", "versions": versions})
    site.answer("GET", "/states", b"")
    assert fake.asked.count(("GET", "/v1/models/m/versions/v1/metadata", None)) == 1, "what a version takes is asked once"
    fake.answers["/v1/models/m/metadata"] = (503, {"error": "not loaded yet"})
    assert json.loads(site.answer("GET", "/states", b"").content)["default"] == ""
    fake.answers["/v1/models/m"] = (404, {"error": "there is no model 'm' here"})
    answer = site.answer("GET", "/states", b"")
    assert (answer.status, json.loads(answer.content)) == (404, {"error": "there is no model 'm' here"})


@pytest.mark.parametrize(
    ("version", "content", "status", "says"),
    [
        ("v1", b"[0, 1]", 400, "a drawing is a list of 784 numbers"),
        ("v1", b"{}", 400, "a drawing is a list of 784 numbers"),
        ("v1", b"[", 400, "Expecting value"),
        ("v1", b"\xff", 400, "codec can't decode"),
        ("v1", b"[" * 9000, 400, ""),  # too deep, or of no end, by the version of Python
        ("v1", json.dumps([0] * 783 + [1.01]).encode(), 400, "a drawing's numbers are from 0 to 1"),
        ("v1", json.dumps([0] * 783 + [True]).encode(), 400, "a drawing's numbers are from 0 to 1"),
        ("v1", json.dumps([0] * 783 + [float("nan")]).encode(), 400, "a drawing's numbers are from 0 to 1"),
        ("v2", BLANK, 404, "version v2 is not there, or takes no drawing"),
        ("v3", BLANK, 404, "version v3 is not there, or takes no drawing"),
        ("v9", BLANK, 504, "the model server on master-0 does not answer"),
    ],
)
def test_drawings_that_are_not_asked(
    site: Site, fake: FakeServer, version: str, content: bytes, status: int, says: str
) -> None:
    answer = site.answer("POST", f"/predict/{version}", content)
    assert (answer.status, says in json.loads(answer.content)["error"]) == (status, True), answer.content
    assert not any(path.endswith(":predict") for _, path, _ in fake.asked)


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ((503, {"error": "too many wait"}), 503),
        ((reach.NOBODY, {"error": "no model server answers on master-0"}), 503),
        ((200, {"predictions": [{"probabilities": [0.5, float("nan")] * 5}]}), 502),
        ((200, {"predictions": []}), 502),
        ((200, {"predictions": [{"other": TEN}]}), 502),
        ((500, []), 502),
    ],
)
def test_answers_that_are_none(site: Site, fake: FakeServer, said: tuple[int, Any], status: int) -> None:
    fake.answers["/v1/models/m/versions/v1:predict"] = said
    assert site.answer("POST", "/predict/v1", BLANK).status == status


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/", HERE, None),
        ("GET", "/states", HERE, None),
        ("GET", "/states", {"host": f"localhost:{PORT}"}, None),
        ("POST", "/predict/v1", POST, None),
        ("POST", "/predict/v1", POST | {"origin": f"http://127.0.0.1:{PORT}"}, None),
        ("GET", "/", {}, 403),
        ("GET", "/", {"host": f"evil.example:{PORT}"}, 403),
        ("GET", "/", {"host": "127.0.0.1"}, 403),
        ("GET", "/", {"host": f"127.0.0.1:{PORT + 1}"}, 403),
        ("GET", "/", {"host": f"127.0.0.1:{PORT}.evil.example"}, 403),
        ("POST", "/predict/v1", POST | {"origin": "http://evil.example"}, 403),
        ("POST", "/predict/v1", POST | {"origin": f"http://localhost:{PORT}"}, 403),
        ("POST", "/predict/v1", POST | {"origin": "null"}, 403),
        ("GET", "/v1/models/m", HERE, 404),
        ("GET", "/metrics", HERE, 404),
        ("GET", "/predict/v1", HERE, 404),
        ("GET", "/../fabfile.py", HERE, 404),
        ("POST", "/", POST, 404),
        ("POST", "/states", POST, 404),
        ("POST", "v1", POST, 404),
        ("POST", "/predict/", POST, 404),
        ("POST", "/predict/v1/metadata", POST, 404),
        ("POST", "/predict/v1:classify", POST, 404),
        ("POST", "/predict/..%2fv1", POST, 404),
        ("POST", "/predict/v1", POST | {"content-type": "text/plain"}, 415),
        ("POST", "/predict/v1", HERE | {"content-type": "application/json"}, 411),
        ("POST", "/predict/v1", POST | {"content-length": "-1"}, 411),
        ("POST", "/predict/v1", POST | {"transfer-encoding": "chunked"}, 411),
        ("POST", "/predict/v1", POST | {"content-length": "32769"}, 413),
        ("POST", "/predict/v1", POST | {"content-length": "9" * 5000}, 413),
    ],
)
def test_who_is_answered(site: Site, method: str, path: str, headers: dict[str, str], status: int | None) -> None:
    refused = site.refusal(method, path, headers)
    assert (refused.status if refused else None) == status


def spoken(site: Site, said: bytes) -> bytes:
    """What a browser gets that says this and then is silent."""
    here, there = socket.socketpair()
    with here, there:
        here.sendall(said)
        here.shutdown(socket.SHUT_WR)
        Quiet(there, ("127.0.0.1", 1), SimpleNamespace(site=site))  # type: ignore[arg-type]
        there.close()
        return b"".join(iter(lambda: here.recv(65536), b""))


class Quiet(Handler):
    disable_nagle_algorithm = False  # a pair of sockets has none


def test_how_it_is_said(site: Site) -> None:
    host = f"Host: 127.0.0.1:{PORT}\r\n".encode()
    head, _, page = spoken(site, b"GET / HTTP/1.1\r\n" + host + b"\r\n").partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert (lines[0], page) == ("HTTP/1.1 200 OK", b"<page>")
    assert (
        "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'" in lines
    )
    assert {"X-Content-Type-Options: nosniff", "Content-Length: 6", "Cache-Control: no-store"} <= {*lines}
    assert not any(line.lower().startswith("access-control") for line in lines)
    post = b"POST /predict/v1 HTTP/1.1\r\n" + host + b"Content-Type: application/json\r\nContent-Length: "
    both = spoken(site, (post + b"%d\r\n\r\n" % len(BLANK) + BLANK) * 2)
    assert both.count(b"HTTP/1.1 200 OK") == 2, "a connection is kept"
    large = spoken(site, post + b"40000\r\n\r\nGET / HTTP/1.1\r\n" + host + b"\r\n")
    assert (large.count(b"HTTP/1.1"), b" 413 " in large) == (1, True), "what was not read is no request"
    assert spoken(site, b"OPTIONS /predict/v1 HTTP/1.1\r\n" + host + b"\r\n").startswith(b"HTTP/1.1 501 ")


def test_the_page_needs_nothing_but_its_own_files(tmp_path: Path) -> None:
    made = trying.files("<b>m</b>", tmp_path)
    assert sorted(made) == ["/", "/digit.js", "/page.css", "/page.js"]
    page = made["/"][1].decode()
    assert "&lt;b&gt;m&lt;/b&gt;" in page
    assert "test image" not in page, "there is no MNIST"
    assert {*re.findall(r'(?:src|href)="([^"]*)"', page)} == {"data:,", "/page.css", "/page.js"}
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script>", page)
    assert not any(
        b"//" in content.replace(b"// ", b"") or b"url(" in content for path, (_, content) in made.items() if path != "/"
    )


def test_the_first_test_image_of_each_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trying, "images", lambda data: iter([(b"\x01", 7), (b"\x02", 2), (b"\x03", 7)]))
    assert trying.ten(Path()) == [(2, "Ag=="), (7, "AQ==")]


@pytest.fixture
def cluster(inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeServer) -> Cluster:
    """One on which model `m` is deployed, and `fake` answers; its connection breaks off at once."""
    monkeypatch.setattr(reach, "Servers", lambda _: fake)
    monkeypatch.setattr(trying, "_READY_SECONDS", 0.0)
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    made = Cluster(replace(inventory, operator_bucket=str(bucket)), None, None, Ledger(Folder(bucket)))
    record = Model("m", default="v1", versions=[Version("v1", VersionState.READY), Version("v2", VersionState.FAILED)])
    catalog_of(made).change("m", lambda _: record, create=True)
    return made


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> list[SiteServer]:
    """Fills with the servers that are made; each listens on a port that was free, whichever was asked for."""
    made: list[SiteServer] = []

    def listen(address: str, _: int) -> SiteServer:
        made.append(SiteServer(address, 0))
        return made[-1]

    monkeypatch.setattr(trying, "SiteServer", listen)
    return made


def test_the_address_is_said(
    cluster: Cluster, listening: list[SiteServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OpsError, match="the connection to the host broke off: run fab try again"):
        trying.trying(cluster, None, None, tmp_path)
    assert [f"http://127.0.0.1:{server.port}/\n" for server in listening] == [capsys.readouterr().out]


@pytest.mark.usefixtures("listening")
def test_ctrl_c_ends_it(cluster: Cluster, fake: FakeServer, tmp_path: Path) -> None:
    fake.ends = KeyboardInterrupt()
    before = threading.active_count()
    assert trying.trying(cluster, "m", None, tmp_path) == 0
    wait_for(lambda: threading.active_count() <= before, "the end of the page's server")


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize(
    ("path", "answer", "kind", "says"),
    [
        (
            "",
            (reach.NOBODY, {"error": "no model server answers on master-0"}),
            OpsError,
            "answers on master-0: fab deploy starts it",
        ),
        ("", states(("v1", "LOADING")), OpsError, "no version of model m has answered in 0 s: fab versions m"),
        ("", (404, {"error": "there is no model 'm' here"}), OpsError, "no version of model m has answered in 0 s"),
        (
            "/versions/v1/metadata",
            (200, PRICES),
            UsageError,
            "version v1 of model m takes rooms int32 [?, 3], text float of any shape, gives price float [?]; "
            "fab try draws for a model that takes one image float [?, 784], a key int64 [?] beside it or none, "
            "and gives probabilities float [?, 10]",
        ),
    ],
)
def test_what_cannot_be_shown(
    cluster: Cluster, fake: FakeServer, tmp_path: Path, path: str, answer: Any, kind: type[OpsError], says: str
) -> None:
    fake.answers[f"/v1/models/m{path}"] = answer
    with pytest.raises(OpsError, match=re.escape(says)) as caught:
        trying.trying(cluster, "m", None, tmp_path)
    assert type(caught.value) is kind


def test_wrong_calls(cluster: Cluster, fake: FakeServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for model, given, says in [
            ("m", "0", "--port '0' is no port; valid are 1 to 65535"),
            ("m", port, f"port {port} is taken on this machine: give another --port"),
            ("n", None, "there is no model 'n'; there are m"),
        ]:
            with pytest.raises(UsageError, match=re.escape(says)):
                trying.trying(cluster, model, given, tmp_path)
    catalog_of(cluster).change("m", lambda m: replace(m, default="", versions=[Version("v1", VersionState.UNDEPLOYED)]))
    with pytest.raises(
        UsageError, match="no version of model m is served: v1 is UNDEPLOYED; fab deploy --model m brings one back"
    ):
        trying.trying(cluster, None, None, tmp_path)
    assert fake.asked == []
