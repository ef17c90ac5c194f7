import { SIDE, prepared } from "./digit.js";
import { CLASSES, described, probabilities, questionOf, request } from "./model.js";

const SIZE = 560;
const PEN = 44;
// Each version is asked 8 times a second at most, and again only once it has answered.
const GAP_MS = 125;
const LOOK_MS = 2000;
// When the pen has rested for so long, somebody who does not see the page is told the answers.
const REST_MS = 700;

const model = new URLSearchParams(location.search).get("model") ?? "";
const where = `/v1/models/${encodeURIComponent(model)}`;
const find = (selector, root = document) => root.querySelector(selector);
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const percent = (value) => `${(value * 100).toFixed(1)} %`;
const drawing = find("#drawing");
const pen = drawing.getContext("2d", { alpha: false, willReadFrequently: true });
const seen = find("#seen").getContext("2d", { alpha: false });
const lanes = new Map();
let current = null; // the 784 numbers, null for an empty drawing
let turn = 0; // counts how often all was wiped away: an answer to what was before is none

const copy = (template) => find(template).content.firstElementChild.cloneNode(true);

// An answer of the REST API; an Error with its line if it is none.
async function ask(path, body) {
  const options = body && { method: "POST", headers: { "Content-Type": "application/json" }, body };
  let response, answer;
  try {
    response = await fetch(where + path, options);
    answer = await response.json();
  } catch {
    throw new Error("examples/draw/draw.py does not answer: start it again.");
  }
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

// A version: its card, and its questions, one after the other; of those that wait the newest is asked and the others forgotten.
class Lane {
  constructor(name, metadata) {
    this.name = name;
    this.card = copy("#card");
    this.bars = Array.from({ length: CLASSES }, (_, digit) => {
      const bar = copy("#bar");
      find(".which", bar).textContent = digit;
      find("ol", this.card).append(bar);
      return bar;
    });
    this.question = questionOf(metadata);
    this.refusal = this.question ? "" : `takes no drawing: it ${described(metadata)}`;
    this.wanted = null;
    this.busy = false;
    this.trouble = !this.question;
    this.said = "";
    find(".name", this.card).textContent = name;
    this.clear();
  }

  clear() {
    this.wanted = null;
    this.said = "";
    this.show("–", this.refusal, "", []);
  }

  ask(image) {
    if (!this.question) return;
    this.wanted = image;
    if (!this.busy) this.work();
  }

  async work() {
    this.busy = true;
    while (this.wanted) {
      const image = this.wanted, asked = turn, began = performance.now();
      this.wanted = null;
      const answer = await this.answer(image);
      if (asked === turn) this.take(answer);
      await pause(GAP_MS - (performance.now() - began));
    }
    this.busy = false;
  }

  async answer(image) {
    const began = performance.now();
    try {
      const answer = await ask(`/versions/${this.name}:predict`, request(this.question, image));
      return { probabilities: probabilities(this.question, answer), milliseconds: performance.now() - began };
    } catch (error) {
      return { error: error.message };
    }
  }

  take(answer) {
    this.trouble = "error" in answer;
    if (this.trouble) {
      this.said = "";
      this.show("–", answer.error, "", []);
      return;
    }
    const values = answer.probabilities, best = values.indexOf(Math.max(...values));
    this.said = `${this.name}: ${best}, ${percent(values[best])}`;
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

// What is on the canvas goes to the preview and to all versions, once a frame at most.
let framed = false;
function changed() {
  find("#hint").hidden = true;
  if (framed) return;
  framed = true;
  requestAnimationFrame(() => {
    framed = false;
    const pixels = pen.getImageData(0, 0, SIZE, SIZE).data;
    current = prepared(pixels.filter((_, place) => place % 4 === 0), SIZE);
    preview(current);
    if (!current) return;
    for (const lane of lanes.values()) lane.ask(current);
    rested();
  });
}

function preview(image) {
  paint(seen, (image ?? new Array(SIDE * SIDE).fill(0)).map((value) => Math.round(value * 255)));
}

function paint(context, levels) {
  const picture = context.createImageData(SIDE, SIDE);
  levels.forEach((level, place) => picture.data.set([level, level, level, 255], place * 4));
  context.putImageData(picture, 0, 0);
}

let rest = 0;
function rested() {
  clearTimeout(rest);
  rest = setTimeout(() => {
    find("#told").textContent = [...lanes.values()].map((lane) => lane.said).filter(Boolean).join("; ");
  }, REST_MS);
}

function wipe() {
  turn += 1;
  pen.fillStyle = "#000";
  pen.fillRect(0, 0, SIZE, SIZE);
}

function clear() {
  wipe();
  current = null;
  clearTimeout(rest);
  preview(null);
  for (const lane of lanes.values()) lane.clear();
  find("#hint").hidden = false;
  find("#told").textContent = "";
}

// The pen: one pointer at a time, a dot where it comes down, a line as far as it goes.
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
  changed();
});
drawing.addEventListener("pointermove", (event) => {
  if (event.pointerId !== down?.id) return;
  const all = event.getCoalescedEvents?.() ?? [];
  for (const each of all.length ? all : [event]) {
    const to = place(each);
    line(down.at, to);
    down.at = to;
  }
  changed();
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
      wipe();
      pen.imageSmoothingEnabled = false;
      pen.drawImage(small, 0, 0, SIZE, SIZE);
      changed();
    });
    find(".tests").append(button);
  });
  find(".tests").hidden = !images.length;
}

// Which versions there are, which of them is the default: both may change while the page is open.
async function look() {
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
  const byDefault = names.length ? (await ask("/metadata")).model_spec.version : "";
  for (const [name, lane] of lanes)
    if (!names.includes(name)) {
      lane.card.remove();
      lanes.delete(name);
    }
  for (const name of names) {
    const known = lanes.get(name);
    if (!known) {
      const lane = new Lane(name, await ask(`/versions/${name}/metadata`)); // a name is used once, so this is asked once
      lanes.set(name, lane);
      find("#answers").append(lane.card);
    }
    const lane = lanes.get(name);
    find(".default", lane.card).hidden = name !== byDefault;
    if (current && (!known || lane.trouble)) lane.ask(current);
  }
}

async function follow() {
  for (;;) {
    if (!document.hidden) await look();
    await pause(LOOK_MS);
  }
}

find("#model").textContent = model;
clear();
offerImages();
follow();
