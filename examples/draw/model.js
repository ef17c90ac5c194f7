// Parse a model's signature, write predict requests, and parse their answers, by TensorFlow Serving's REST API.

const PIXELS = "784";
export const CLASSES = 10;
const ANY = "-1";
const SIGNATURE = "serving_default";
const FLOATS = ["DT_FLOAT", "DT_DOUBLE", "DT_HALF", "DT_BFLOAT16"];
// The preferred outputs if several have a number for each class.
const PREFERRED = ["probabilities", "scores"];

const signature = (metadata) => metadata.metadata.signature_def.signature_def[SIGNATURE] ?? {};
const sizes = (tensor) => (tensor.tensor_shape.unknown_rank ? [] : (tensor.tensor_shape.dim ?? []).map((dim) => dim.size));
const isFloats = (tensor, width) => FLOATS.includes(tensor.dtype) && sizes(tensor).join() === `${ANY},${width}`;
const isKeys = (tensor) => tensor.dtype === "DT_INT64" && sizes(tensor).join() === ANY;

// Return the names of the inputs and of the output from the answer to GET …/metadata; null if the version takes no drawing.
export function parseSignature(metadata) {
  const { inputs = {}, outputs = {} } = signature(metadata);
  const images = Object.keys(inputs).filter((name) => isFloats(inputs[name], PIXELS));
  const keys = Object.keys(inputs).filter((name) => isKeys(inputs[name]));
  const answers = Object.keys(outputs).filter((name) => isFloats(outputs[name], CLASSES));
  if (images.length !== 1 || keys.length > 1 || !answers.length) return null;
  if (images.length + keys.length !== Object.keys(inputs).length) return null;
  const output = PREFERRED.find((name) => answers.includes(name)) ?? answers[0];
  return { image: images[0], key: keys[0] ?? null, output };
}

// Return text such as `takes x float [?, 3], gives y float [?]`.
export function describeSignature(metadata) {
  const { inputs, outputs } = signature(metadata);
  if (!inputs && !outputs) return `has no signature ${SIGNATURE}`;
  const listed = (tensors) => Object.entries(tensors ?? {}).map(tensorLine).join(", ") || "nothing";
  return `takes ${listed(inputs)}, gives ${listed(outputs)}`;
}

function tensorLine([name, tensor]) {
  const kind = tensor.dtype.replace("DT_", "").toLowerCase();
  if (tensor.tensor_shape.unknown_rank) return `${name} ${kind} of any shape`;
  return `${name} ${kind} [${sizes(tensor).map((size) => (size === ANY ? "?" : size)).join(", ")}]`;
}

// Return the body of POST …:predict.
export function request(names, image) {
  return JSON.stringify({ instances: [{ [names.image]: image, ...(names.key === null ? {} : { [names.key]: 0 }) }] });
}

// Return the ten probabilities in an answer, by softmax if its numbers are no probabilities; Error if there are not ten.
export function probabilities(names, answer) {
  const row = answer.predictions?.[0];
  const values = Array.isArray(row) ? row : row?.[names.output]; // a single output is without its name
  if (values?.length !== CLASSES || !values.every(Number.isFinite)) throw new Error(`the answer has not ${CLASSES} numbers`);
  if (values.every((value) => value >= 0 && value <= 1)) return values;
  const most = Math.max(...values);
  const powers = values.map((value) => Math.exp(value - most));
  const sum = powers.reduce((total, power) => total + power);
  return powers.map((power) => power / sum);
}
