// Convert a drawing to the form of MNIST's images: white on black, the digit's box scaled to fit 20 × 20 with the same aspect
// ratio, and moved by whole pixels until its centre of mass is in the middle of 28 × 28. So a test image is not changed.
// Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits".

export const SIDE = 28;
const BOX = 20;
// More than all rounding errors of a sum over pixels, and far less than a pixel.
const ROUNDING = 1e-6;

// Return 784 numbers from 0 to 1, row by row, for `side` × `side` levels from 0 to 255; null for an empty drawing.
export function toMnistImage(levels, side) {
  const box = boxOf(levels, side);
  if (!box) return null;
  const scale = BOX / Math.max(box.width, box.height);
  const width = Math.ceil(box.width * scale - ROUNDING), height = Math.ceil(box.height * scale - ROUNDING);
  const small = new Float64Array(width * height);
  const across = shares(box.width, scale), down = shares(box.height, scale);
  for (const [y, row, part] of down)
    for (const [x, column, share] of across)
      small[row * width + column] += part * share * levels[(box.top + y) * side + box.left + x];
  let mass = 0, massX = 0, massY = 0;
  small.forEach((level, place) => {
    mass += level;
    massX += level * (place % width + 0.5);
    massY += level * (Math.floor(place / width) + 0.5);
  });
  const left = offset(massX / mass, width), top = offset(massY / mass, height);
  const image = new Array(SIDE * SIDE).fill(0);
  small.forEach((level, place) => {
    const at = (top + Math.floor(place / width)) * SIDE + left + place % width;
    image[at] = Math.min(1, Math.round(level / 255 * 1e4) / 1e4);
  });
  return image;
}

// Return the smallest box that contains all pixels that are not black.
function boxOf(levels, side) {
  let left = side, right = -1, top = side, bottom = -1;
  for (let y = 0; y < side; y++)
    for (let x = 0; x < side; x++)
      if (levels[y * side + x]) {
        left = Math.min(left, x);
        right = Math.max(right, x);
        top = Math.min(top, y);
        bottom = y;
      }
  return right < 0 ? null : { left, top, width: right - left + 1, height: bottom - top + 1 };
}

// Return for each pixel of a line the scaled pixels that it covers: [pixel, scaled pixel, covered share of the scaled pixel].
function shares(length, scale) {
  const result = [];
  for (let pixel = 0; pixel < length; pixel++) {
    const end = (pixel + 1) * scale;
    for (let from = pixel * scale; from < end - ROUNDING; ) {
      const to = Math.min(end, Math.floor(from + ROUNDING) + 1);
      result.push([pixel, Math.floor(from + ROUNDING), to - from]);
      from = to;
    }
  }
  return result;
}

// Return the offset that moves a centre of mass to the middle, rounded as in MNIST; the line stays inside.
function offset(centre, length) {
  return Math.max(0, Math.min(SIDE - length, Math.ceil(SIDE / 2 - centre - ROUNDING)));
}
