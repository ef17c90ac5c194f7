// A drawing in the form of MNIST's images: white on black, the digit's box scaled to fit 20 × 20 without another aspect, and
// put into 28 × 28 where its centre of mass is in the middle, by whole pixels. So each test image stays what it is.
// Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits".

export const SIDE = 28;
const BOX = 20;
// What is added up pixel by pixel is not quite what it should be: far less than this, which is far less than a pixel.
const SLACK = 1e-6;

// The 784 numbers from 0 to 1, row by row, of `side` × `side` levels from 0 to 255; null for an empty drawing.
export function prepared(levels, side) {
  const box = boxOf(levels, side);
  if (!box) return null;
  const scale = BOX / Math.max(box.width, box.height);
  const width = Math.ceil(box.width * scale - SLACK), height = Math.ceil(box.height * scale - SLACK);
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

// The smallest box with all that is not black.
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

// How much each pixel of a line gives to those of the scaled line: [pixel, scaled pixel, share of the scaled one that it covers].
function shares(length, scale) {
  const found = [];
  for (let pixel = 0; pixel < length; pixel++) {
    const end = (pixel + 1) * scale;
    for (let from = pixel * scale; from < end - SLACK; ) {
      const to = Math.min(end, Math.floor(from + SLACK) + 1);
      found.push([pixel, Math.floor(from + SLACK), to - from]);
      from = to;
    }
  }
  return found;
}

// Where a line begins so that its centre is in the middle, rounded as MNIST's were; all of it stays inside.
function offset(centre, length) {
  return Math.max(0, Math.min(SIDE - length, Math.ceil(SIDE / 2 - centre - SLACK)));
}
