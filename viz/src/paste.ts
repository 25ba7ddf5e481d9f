/** Reads a pasted matrix: CSV, TSV, spaces, JSON, or as torch and NumPy print it; inf and nan in any case. */

export const MAX_ROWS = 256;
export const MAX_COLS = 1024;
export const MAX_ELEMENTS = 4096;

export type Matrix = number[][];

/** The matrix in a text. Throws an Error that names the fault and its place. */
export function parseMatrix(text: string): Matrix {
  const trimmed = text.trim();
  if (trimmed === "") throw new Error("Nothing to read: paste at least one number.");
  const printed = /^(?:[\w.]+\()?\s*(\[[^]*\])(?:,\s*\w+=[^]*)?\)?$/.exec(trimmed);
  const matrix = printed ? parseBrackets(printed[1]!) : trimmed.startsWith("[") ? parseBrackets(trimmed) : parseLines(trimmed);
  return checkMatrix(matrix);
}

/** Throws unless all rows have the same length and the matrix is within the limits. */
export function checkMatrix(matrix: Matrix): Matrix {
  const width = matrix[0]?.length ?? 0;
  if (width === 0) throw new Error("The matrix is empty.");
  matrix.forEach((row, index) => {
    if (row.length !== width) {
      throw new Error(`Row ${index + 1} has ${numbers(row.length)}, but the first row has ${width}. All rows need the same length.`);
    }
  });
  if (matrix.length > MAX_ROWS) throw new Error(`${matrix.length} rows are too many: this page replays at most ${MAX_ROWS}.`);
  if (width > MAX_COLS) throw new Error(`${width} columns are too many: this page replays at most ${MAX_COLS}.`);
  if (matrix.length * width > MAX_ELEMENTS) {
    throw new Error(`${matrix.length} × ${width} is too large: this page replays at most ${MAX_ELEMENTS} elements.`);
  }
  return matrix;
}

function numbers(n: number): string {
  return n === 1 ? "1 number" : `${n} numbers`;
}

function parseLines(text: string): Matrix {
  const lines = text.split(/\r\n|\r|\n/);
  const rows: Matrix = [];
  lines.forEach((line, index) => {
    if (line.trim() === "") return;
    rows.push(fieldsOf(line).map((field, column) => parseNumber(field, `line ${index + 1}, number ${column + 1}`)));
  });
  return rows;
}

function fieldsOf(line: string): string[] {
  const trimmed = line.trim().replace(/[,;]\s*$/, "");
  if (/[,;\t]/.test(trimmed)) return trimmed.split(trimmed.includes(";") ? ";" : trimmed.includes("\t") ? "\t" : ",");
  return trimmed.split(/\s+/);
}

const WORDS: Readonly<Record<string, number>> = {
  inf: Infinity,
  infinity: Infinity,
  "∞": Infinity,
  nan: NaN,
};

function parseNumber(field: string, place: string): number {
  const text = field.trim().replace(/\u2212/g, "-").toLowerCase();
  const [, sign, word] = /^([+-]?)(.*)$/.exec(text) as unknown as [string, string, string];
  const named = WORDS[word];
  if (named !== undefined) return sign === "-" ? -named : named;
  if (!/^(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/.test(word)) {
    throw new Error(text === "" ? `The field at ${place} is empty.` : `“${field.trim()}” at ${place} is not a number.`);
  }
  const value = Number(word);
  if (!Number.isFinite(value)) throw new Error(`“${field.trim()}” at ${place} is too large for any float.`);
  return sign === "-" ? -value : value;
}

function parseBrackets(text: string): Matrix {
  // Python writes inf and nan bare, and ends numbers with a point; NumPy writes no commas.
  const quoted = text
    .replace(/"[^"]*"|[^\s,[\]"]+/g, (found) => (found.startsWith('"') ? found : `"${found}"`))
    .replace(/(["\]])\s+(?=["[])/g, "$1, ");
  let value: unknown;
  try {
    value = JSON.parse(quoted);
  } catch (error) {
    throw new Error(`This starts like JSON but is not valid JSON: ${(error as Error).message}.`);
  }
  const rows = Array.isArray(value) && value.some(Array.isArray) ? (value as unknown[]) : [value];
  return rows.map((row, index) => {
    if (!Array.isArray(row)) throw new Error(`Row ${index + 1} is not a list of numbers.`);
    return row.map((each: unknown, column) => {
      const place = `row ${index + 1}, number ${column + 1}`;
      if (typeof each === "number") return each;
      if (typeof each === "string") return parseNumber(each, place);
      throw new Error(`${JSON.stringify(each)} at ${place} is not a number.`);
    });
  });
}
