import { SIDE, toMnistImage } from "./digit.js";
import { CLASSES, describeSignature, parseSignature, probabilities, request } from "./model.js";

const SIZE = 560;
const PEN = 44;
// Each version gets at most 8 requests a second, and the next one only after it has answered.
const GAP_MS = 125;
const POLL_MS = 2000;
// When the pen has rested this long, screen readers announce the answers.
const ANNOUNCE_MS = 700;

const model = new URLSearchParams(location.search).get("model") ?? "";
const apiPath = `/v1/models/${encodeURIComponent(model)}`;
const find = (selector, root = document) => root.querySelector(selector);
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const percent = (value) => `${(value * 100).toFixed(1)} %`;
const drawing = find("#drawing");
const pen = drawing.getContext("2d", { alpha: false, willReadFrequently: true });
const previewContext = find("#preview").getContext("2d", { alpha: false });
const versions = new Map();
let current = null; // the 784 numbers, null for an empty drawing
let drawings = 0; // the number of started drawings: an answer for an earlier drawing is ignored

const copy = (template) => find(template).content.firstElementChild.cloneNode(true);

// Return an answer of the REST API; throw an Error with its message if the request failed.
async function ask(path, body) {
  const options = body && { method: "POST", headers: { "Content-Type": "application/json" }, body };
  let response, answer;
  try {
    response = await fetch(apiPath + path, options);
    answer = await response.json();
  } catch {
    throw new Error("examples/draw/draw.py does not answer: start it again.");
  }
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

// A version's card and its requests, one after the other; of the images that wait only the newest is sent.
class VersionCard {
  constructor(name, metadata) {
    this.name = name;
    this.card = copy("#card");
    this.bars = Array.from({ length: CLASSES }, (_, digit) => {
      const bar = copy("#bar");
      find(".which", bar).textContent = digit;
      find("ol", this.card).append(bar);
      return bar;
    });
    this.signature = parseSignature(metadata);
    this.refusal = this.signature ? "" : `takes no drawing: it ${describeSignature(metadata)}`;
    this.nextImage = null;
    this.busy = false;
    this.trouble = !this.signature;
    this.summary = "";
    find(".name", this.card).textContent = name;
    this.clear();
  }

  clear() {
    this.nextImage = null;
    this.summary = "";
    this.show("–", this.refusal, "", []);
  }

  ask(image) {
    if (!this.signature) return;
    this.nextImage = image;
    if (!this.busy) this.work();
  }

  async work() {
    this.busy = true;
    while (this.nextImage) {
      const image = this.nextImage, started = drawings, began = performance.now();
      this.nextImage = null;
      const answer = await this.answer(image);
      if (started === drawings) this.showAnswer(answer);
      await pause(GAP_MS - (performance.now() - began));
    }
    this.busy = false;
  }

  async answer(image) {
    const began = performance.now();
    try {
      const answer = await ask(`/versions/${this.name}:predict`, request(this.signature, image));
      return { probabilities: probabilities(this.signature, answer), milliseconds: performance.now() - began };
    } catch (error) {
      return { error: error.message };
    }
  }

  showAnswer(answer) {
    this.trouble = "error" in answer;
    if (this.trouble) {
      this.summary = "";
      this.show("–", answer.error, "", []);
      return;
    }
    const values = answer.probabilities, best = values.indexOf(Math.max(...values));
    this.summary = `${this.name}: ${best}, ${percent(values[best])}`;
    this.show(best, percent(values[best]), `${answer.milliseconds.toFixed(1)} ms`, values);
  }

  show(answer, sure, time, values) {
    find(".answer", this.card).textContent = answer;
    find(".sure", this.card).textContent = sure;
    find(".time", this.card).textContent = time;
    this.card.classList.toggle("trouble", this.trouble);
    this.bars.forEach((bar, digit) => {
      const value = values[digit] ?? 0;
      bar.classList.toggle("best", digit === answer);
      find(".fill", bar).style.width = `${value * 100}%`;
      find(".percent", bar).textContent = values.length ? percent(value) : "";
    });
  }
}

// Send the drawing to the preview and to all versions, at most once per frame.
let frameRequested = false;
function drawingChanged() {
  find("#hint").hidden = true;
  if (frameRequested) return;
  frameRequested = true;
  requestAnimationFrame(() => {
    frameRequested = false;
    const pixels = pen.getImageData(0, 0, SIZE, SIZE).data;
    current = toMnistImage(pixels.filter((_, place) => place % 4 === 0), SIZE);
    preview(current);
    if (!current) return;
    for (const version of versions.values()) version.ask(current);
    announceLater();
  });
}

function preview(image) {
  paint(previewContext, (image ?? new Array(SIDE * SIDE).fill(0)).map((value) => Math.round(value * 255)));
}

function paint(context, levels) {
  const picture = context.createImageData(SIDE, SIDE);
  levels.forEach((level, place) => picture.data.set([level, level, level, 255], place * 4));
  context.putImageData(picture, 0, 0);
}

let announceTimer = 0;
function announceLater() {
  clearTimeout(announceTimer);
  announceTimer = setTimeout(() => {
    find("#announcement").textContent = [...versions.values()].map((version) => version.summary).filter(Boolean).join("; ");
  }, ANNOUNCE_MS);
}

function clearCanvas() {
  drawings += 1;
  pen.fillStyle = "#000";
  pen.fillRect(0, 0, SIZE, SIZE);
}

function clear() {
  clearCanvas();
  current = null;
  clearTimeout(announceTimer);
  preview(null);
  for (const version of versions.values()) version.clear();
  find("#hint").hidden = false;
  find("#announcement").textContent = "";
}

// Draw with one pointer at a time: a dot where it is pressed, and lines where it moves.
let down = null;
function place(event) {
  const box = drawing.getBoundingClientRect();
  return [((event.clientX - box.left) * SIZE) / box.width, ((event.clientY - box.top) * SIZE) / box.height];
}

function line(from, to) {
  pen.strokeStyle = "#fff";
  pen.lineWidth = PEN;
  pen.lineCap = pen.lineJoin = "round";
  pen.beginPath();
  pen.moveTo(...from);
  pen.lineTo(...to);
  pen.stroke();
}

drawing.addEventListener("pointerdown", (event) => {
  if (down || event.button !== 0) return;
  event.preventDefault();
  drawing.setPointerCapture(event.pointerId);
  down = { id: event.pointerId, at: place(event) };
  line(down.at, down.at);
  drawingChanged();
});
drawing.addEventListener("pointermove", (event) => {
  if (event.pointerId !== down?.id) return;
  const all = event.getCoalescedEvents?.() ?? [];
  for (const each of all.length ? all : [event]) {
    const to = place(each);
    line(down.at, to);
    down.at = to;
  }
  drawingChanged();
});
for (const kind of ["pointerup", "pointercancel", "lostpointercapture"])
  drawing.addEventListener(kind, (event) => {
    if (event.pointerId === down?.id) down = null;
  });
find("#clear").addEventListener("click", clear);

async function offerImages() {
  const images = await (await fetch("/images.json")).json();
  images.forEach((image, place) => {
    const button = document.createElement("button"), small = document.createElement("canvas");
    small.width = small.height = SIDE;
    paint(small.getContext("2d"), image.map((value) => Math.round(value * 255)));
    button.type = "button";
    button.setAttribute("aria-label", `Test image ${place + 1}`);
    button.append(small);
    button.addEventListener("click", () => {
      clearCanvas();
      pen.imageSmoothingEnabled = false;
      pen.drawImage(small, 0, 0, SIZE, SIZE);
      drawingChanged();
    });
    find(".tests").append(button);
  });
  find(".tests").hidden = !images.length;
}

// Poll the versions and the default, which may change while the page is open.
async function poll() {
  const trouble = find("#trouble");
  try {
    const { model_version_status: states } = await ask("");
    const names = states.filter((each) => each.state === "AVAILABLE").map((each) => each.version);
    await show(names);
    trouble.textContent = names.length ? "" : `no version of model ${model} answers: fab versions ${model}`;
  } catch (error) {
    trouble.textContent = error.message;
  }
  trouble.hidden = !trouble.textContent;
}

async function show(names) {
  const defaultName = names.length ? (await ask("/metadata")).model_spec.version : "";
  for (const [name, version] of versions)
    if (!names.includes(name)) {
      version.card.remove();
      versions.delete(name);
    }
  for (const name of names) {
    const existing = versions.get(name);
    if (!existing) {
      const version = new VersionCard(name, await ask(`/versions/${name}/metadata`)); // the signature of a version never changes
      versions.set(name, version);
      find("#answers").append(version.card);
    }
    const version = versions.get(name);
    find(".default", version.card).hidden = name !== defaultName;
    if (current && (!existing || version.trouble)) version.ask(current);
  }
}

async function follow() {
  for (;;) {
    if (!document.hidden) await poll();
    await pause(POLL_MS);
  }
}

find("#model").textContent = model;
clear();
offerImages();
follow();
