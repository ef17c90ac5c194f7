"""The page of examples/draw in a real browser, which needs no cluster: a fake of the REST API answers."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, pairwise
from typing import Any

import pytest
from browser import Browser
from draw import Server

WINDOWS = [(360, 740, "light"), (360, 740, "dark"), (1280, 900, "light"), (1280, 900, "dark")]
# Preprocessed like MNIST: centred, 20 by 20; levels of 255, to the four digits of a request.
IN = range(4, 24)
IMAGES = [
    [round(level * abs(2 * x - 27) / 255, 4) if x in IN and y in IN else 0 for y in range(28) for x in range(28)]
    for level in (3, 7, 11)
]
STROKE = [(0.5, 0.2), (0.5, 0.5), (0.5, 0.8)]
LONG = "a_version_with_a_name_that_is_as_long_as_names_may_get_" + "x" * 70
WIDTH = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
# Each card: name, default or not, answer, confidence, and the widths of its bars in percent of the maximum.
CARDS = """
return [...document.querySelectorAll('.card')].map(card => ({
  name: card.querySelector('.name').textContent,
  default: !card.querySelector('.default').hidden,
  answer: card.querySelector('.answer').textContent,
  sure: card.querySelector('.sure').textContent,
  time: /^\\d+\\.\\d ms$/.test(card.querySelector('.time').textContent),
  bars: [...card.querySelectorAll('li')].map(bar => {
    const [track, fill] = ['.track', '.fill'].map(name => bar.querySelector(name).getBoundingClientRect().width);
    return Math.round(100 * fill / track);
  }),
}));
"""
# Texts that are wider than their box.
CUT = """
const words = [...document.querySelectorAll('h1, h2, p:not(.visually-hidden), li, button, .percent, .answer')];
return words.filter(each => each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).display !== 'inline')
  .map(each => each.textContent);
"""
DRAWINGS = """
const pixels = document.querySelector('#preview').getContext('2d').getImageData(0, 0, 28, 28).data;
return [...pixels].filter((_, place) => place % 4 === 0);
"""
TO_MNIST_IMAGE = "const { toMnistImage } = await import('/digit.js'); return toMnistImage(%s, %d);"
TESTS = """
return [...document.querySelectorAll('.tests button')].map(each => each.getAttribute('aria-label'));
"""


# Make the page record each request's version and time.
WATCH = """
const real = window.fetch;
window.asked = [];
window.fetch = (url, ...rest) => {
  const version = /versions\\/(.*):predict$/.exec(url);
  if (version) window.asked.push([version[1], performance.now()]);
  return real(url, ...rest);
};
"""


class FakeServer:
    """Model `m`: v1, the default, predicts 3, v2 predicts 8, one with a long name with certainty. Requests are recorded."""

    def __init__(self) -> None:
        self.names = {"v1": 3, "v2": 8}
        self.asked: list[tuple[str, list[float]]] = []

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        name = path.removeprefix("/v1/models/m/versions/").partition("/")[0].partition(":")[0]
        if path == "/v1/models/m":
            return 200, {"model_version_status": [{"version": each, "state": "AVAILABLE"} for each in self.names]}
        if path.endswith("/metadata"):
            tensors = [{"dtype": "DT_FLOAT", "tensor_shape": {"dim": [{"size": "-1"}, {"size": n}]}} for n in ("784", "10")]
            signature = {"inputs": {"image": tensors[0]}, "outputs": {"probabilities": tensors[1]}}
            spec = {"version": next(iter(self.names))}
            return 200, {"model_spec": spec, "metadata": {"signature_def": {"signature_def": {"serving_default": signature}}}}
        assert (method, body is not None) == ("POST", True)
        self.asked.append((name, json.loads(body or b"")["instances"][0]["image"]))
        values = [0.0 if name == LONG or digit else 0.25 for digit in range(10)]
        values[self.names[name]] = 1.0 if name == LONG else 0.75
        return 200, {"predictions": [values]}

    def listening(self) -> ThreadingHTTPServer:
        """Serve the same by HTTP, on a free port."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:  # noqa: N805
                handler.answer(None)

            def do_POST(handler) -> None:  # noqa: N805
                handler.answer(handler.rfile.read(int(handler.headers["Content-Length"])))

            def answer(handler, body: bytes | None) -> None:  # noqa: N805
                status, content = self.ask(handler.command, handler.path, body)
                handler.send_response(status)
                handler.end_headers()
                handler.wfile.write(json.dumps(content).encode())

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def last_drawing(fake: FakeServer, name: str) -> list[int]:
    """Return the levels of the drawing in the last request to a version; empty if there was none."""
    return [round(value * 255) for value in next((image for each, image in reversed(fake.asked) if each == name), [])]


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[str]:
    """Serve in a thread; the address."""
    with server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def url(fake: FakeServer) -> Iterator[str]:
    """Return the page's address."""
    with serving(fake.listening()) as api, serving(Server(0, api, IMAGES)) as address:
        yield f"http://{address}/?model=m"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.parametrize(("width", "height", "scheme"), WINDOWS)
def test_touch_and_mouse_drawings_are_predicted(
    browser: Browser, url: str, fake: FakeServer, width: int, height: int, scheme: str
) -> None:
    fake.names[LONG] = 9
    browser.emulate(width, height, scheme)
    browser.read_logs()
    browser.open(url)
    browser.await_script(CARDS, lambda cards: len(cards) == 3)
    browser.draw("#drawing", STROKE, "touch" if width < 600 else "mouse")

    def card(name: str, digit: int, confidence: int = 75) -> dict[str, Any]:
        bars = [100 - confidence if each == 0 else confidence if each == digit else 0 for each in range(10)]
        expected = {"name": name, "default": name == "v1", "answer": str(digit)}
        return expected | {"sure": f"{confidence}.0 %", "time": True, "bars": bars}

    expected = [card("v1", 3), card("v2", 8), card(LONG, 9, 100)]
    browser.await_script(CARDS, lambda cards: cards == expected)
    page_width, window_width = browser.value(WIDTH)
    assert page_width <= window_width <= width
    assert browser.value(CUT) == []
    answer = browser.value("return document.querySelector('.answer').getBoundingClientRect().bottom + scrollY")
    assert answer < height, "the first answer is visible while the user draws"
    paper = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 29)"}[scheme]
    assert browser.value("return getComputedStyle(document.documentElement).backgroundColor") == paper
    browser.check_no_messages(url.partition("?")[0], "data:")


def test_the_newest_drawing_wins_and_requests_are_rate_limited(browser: Browser, url: str, fake: FakeServer) -> None:
    browser.emulate(1280, 900)
    browser.open(url)
    browser.await_script(CARDS, lambda cards: len(cards) == 2)
    browser.value(WATCH)

    def moments(name: str) -> list[float]:
        return [moment for each, moment in browser.value("return window.asked") if each == name]

    ring = [(0.5 + 0.3 * math.sin(part / 5), 0.5 - 0.3 * math.cos(part / 5)) for part in range(40)]
    # It answers while the user draws.
    browser.draw("#drawing", ring, until=lambda: min(len(moments(name)) for name in ("v1", "v2")) > 3)
    last = browser.await_script(DRAWINGS, any)
    for name in ("v1", "v2"):
        browser.await_script("return 0", lambda _, name=name: last_drawing(fake, name) == last)
    for name in ("v1", "v2"):
        assert min(later - earlier for earlier, later in pairwise(moments(name))) > 100
    count = browser.value("document.querySelector('#clear').click(); return window.asked.length")
    assert not any(browser.value(DRAWINGS))
    assert {card["answer"] for card in browser.value(CARDS)} == {"\N{EN DASH}"}
    time.sleep(0.5)
    assert browser.value("return window.asked.length") == count, "an empty sheet sends no request"


def test_a_test_image_chosen_by_keyboard_is_sent_unchanged(browser: Browser, url: str, fake: FakeServer) -> None:
    browser.emulate(1280, 900)
    browser.open(url)
    browser.await_script(CARDS, lambda cards: len(cards) == 2)
    browser.await_script(TESTS, lambda labels: labels == [f"Test image {place + 1}" for place in range(len(IMAGES))])
    for place, image in enumerate(IMAGES):
        browser.press(f".tests button:nth-of-type({place + 1})", "\ue007")  # Enter
        expected = [round(value * 255) for value in image]
        browser.await_script(DRAWINGS, lambda drawing, expected=expected: drawing == expected)
    browser.await_script("return 0", lambda _: last_drawing(fake, "v1") == expected)
    text = browser.await_script("return document.querySelector('[role=status]').textContent", bool)
    assert text == "v1: 3, 75.0 %; v2: 8, 75.0 %"


def test_added_and_removed_versions_are_shown(browser: Browser, url: str, fake: FakeServer) -> None:
    browser.emulate(1280, 900)
    browser.open(url)
    browser.await_script(CARDS, lambda cards: len(cards) == 2)
    browser.draw("#drawing", STROKE)
    fake.names = {"v2": 8, "v3": 5}
    cards = browser.await_script(
        CARDS, lambda cards: [(card["name"], card["answer"]) for card in cards] == [("v2", "8"), ("v3", "5")]
    )
    assert [card["default"] for card in cards] == [True, False]


def test_an_unreachable_api_is_reported(browser: Browser, fake: FakeServer) -> None:
    with serving(fake.listening()) as api:
        pass
    with serving(Server(0, api, [])) as address:
        browser.open(f"http://{address}/?model=m")
        text = browser.await_script("return document.querySelector('#trouble').textContent", bool)
    assert text.startswith("fab serve does not answer")


def tensor(dtype: str, *sizes: int) -> dict[str, Any]:
    return {"dtype": dtype, "tensor_shape": {"dim": [{"size": str(size)} for size in sizes], "unknown_rank": False}}


def metadata(inputs: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"signature_def": {"signature_def": {"serving_default": {"inputs": inputs, "outputs": outputs}}}}}


IMAGE, KEY, PROBABILITIES = tensor("DT_FLOAT", -1, 784), tensor("DT_INT64", -1), tensor("DT_FLOAT", -1, 10)
ANYTHING = {"dtype": "DT_FLOAT", "tensor_shape": {"unknown_rank": True}}
PRICES = metadata({"rooms": tensor("DT_INT32", -1, 3), "text": ANYTHING}, {"price": tensor("DT_FLOAT", -1)})
MODEL = "const { parseSignature, describeSignature, request, probabilities } = await import('/model.js'); return %s;"


def test_models_that_accept_drawings_are_detected(browser: Browser, url: str) -> None:
    both = {"scores": PROBABILITIES, "probabilities": PROBABILITIES}
    cases: list[tuple[dict[str, Any], dict[str, Any], tuple[str, str | None, str] | None]] = [
        ({"image": IMAGE, "key": KEY}, both, ("image", "key", "probabilities")),
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
    ]
    browser.open(url)
    questions = browser.value(
        MODEL % f"{json.dumps([metadata(inputs, outputs) for inputs, outputs, _ in cases])}.map(parseSignature)"
    )
    names = ("image", "key", "output")
    assert questions == [question and dict(zip(names, question, strict=True)) for *_, question in cases]
    unsigned = {"metadata": {"signature_def": {"signature_def": {}}}}
    assert browser.value(MODEL % f"{json.dumps([PRICES, unsigned])}.map(describeSignature)") == [
        "takes rooms int32 [?, 3], text float of any shape, gives price float [?]",
        "has no signature serving_default",
    ]
    bodies = browser.value(MODEL % "request({image: 'x', key: 'k'}, [1]) + request({image: 'x', key: null}, [1])")
    assert bodies == '{"instances":[{"x":[1],"k":0}]}{"instances":[{"x":[1]}]}'


def test_probabilities(browser: Browser, url: str) -> None:
    browser.open(url)
    ten = [0.0, 0.0, 0.0, 0.9, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0]
    for row, values in (({"p": ten}, ten), (ten, ten), ([1000.0, 1000.0, *[0.0] * 8], [0.5, 0.5, *[0.0] * 8])):
        assert browser.value(MODEL % f"probabilities({{output: 'p'}}, {json.dumps({'predictions': [row]})})") == values
    for predictions in ([], [{"other": ten}], [ten[1:]], [[*ten[1:], None]]):
        call = f"probabilities({{output: 'p'}}, {json.dumps({'predictions': predictions})})"
        text = browser.value(
            f"const {{ probabilities }} = await import('/model.js'); try {{ {call} }} catch (e) {{ return e.message }}"
        )
        assert text == "the answer has not 10 numbers"


def test_a_model_without_image_input_shows_its_inputs(browser: Browser, url: str, fake: FakeServer) -> None:
    real = fake.ask
    fake.ask = lambda *call: (200, PRICES | {"model_spec": {"version": "v1"}}) if call[1].endswith("metadata") else real(*call)  # type: ignore[method-assign]
    browser.open(url)
    cards = browser.await_script(CARDS, lambda cards: len(cards) == 2)
    assert cards[0]["sure"] == "takes no drawing: it takes rooms int32 [?, 3], text float of any shape, gives price float [?]"


def preprocess(levels: list[list[int]]) -> list[float]:
    """Preprocess a drawing like MNIST by another method: count 20 × 20 parts of each pixel."""
    inked = [(y, x) for y, row in enumerate(levels) for x, level in enumerate(row) if level]
    top, left = min(y for y, _ in inked), min(x for _, x in inked)
    size = max(max(y for y, _ in inked) - top, max(x for _, x in inked) - left) + 1
    box: dict[tuple[int, int], float] = {}
    for y, x in inked:
        for part in range(400):
            # A scaled pixel has size² of these parts, and each part is in one pixel.
            row, column = ((y - top) * 20 + part // 20) // size, ((x - left) * 20 + part % 20) // size
            box[row, column] = box.get((row, column), 0.0) + levels[y][x] / size**2
    mass = sum(box.values())
    height, width = (max(place[axis] for place in box) + 1 for axis in (0, 1))
    down = math.ceil(14 - sum((row + 0.5) * level for (row, _), level in box.items()) / mass - 1e-6)
    across = math.ceil(14 - sum((column + 0.5) * level for (_, column), level in box.items()) / mass - 1e-6)
    down, across = max(0, min(28 - height, down)), max(0, min(28 - width, across))
    image = [0.0] * 784
    for (row, column), level in box.items():
        image[(row + down) * 28 + column + across] = level / 255
    return image


def levels(side: int, *boxes: tuple[int, int, int, int, int]) -> list[list[int]]:
    """Return a sheet with boxes on it, each from its upper left: x, y, width, height, level."""
    sheet = [[0] * side for _ in range(side)]
    for x, y, width, height, level in boxes:
        for row in sheet[y : y + height]:
            row[x : x + width] = [level] * width
    return sheet


@pytest.mark.parametrize(
    "sheet",
    [
        levels(100, (3, 5, 4, 20, 255)),
        levels(100, (60, 70, 7, 30, 255), (67, 70, 13, 5, 120)),
        levels(100, (0, 0, 100, 100, 200), (40, 0, 60, 60, 0)),
        levels(60, (20, 31, 37, 3, 255), (50, 31, 7, 29, 255)),
        levels(60, (59, 59, 1, 1, 77)),
    ],
)
def test_a_drawing_is_preprocessed_like_mnist(browser: Browser, url: str, sheet: list[list[int]]) -> None:
    browser.open(url)
    pixels = browser.value(TO_MNIST_IMAGE % (json.dumps([*chain(*sheet)]), len(sheet)))
    assert pixels == pytest.approx(preprocess(sheet), abs=1e-4)


def test_a_stroke_matches_hand_computed_values(browser: Browser, url: str) -> None:
    """A box of 40 × 10 in a corner: 20 × 5, centred, with half a pixel rounded up."""
    browser.open(url)
    pixels = browser.value(TO_MNIST_IMAGE % (json.dumps([*chain(*levels(80, (0, 0, 10, 40, 255)))]), 80))
    assert [index for index, value in enumerate(pixels) if value] == [
        row * 28 + x for row in range(4, 24) for x in range(12, 17)
    ]
    assert {*pixels} == {0, 1}
    assert browser.value(TO_MNIST_IMAGE % ([0] * 16, 4)) is None
