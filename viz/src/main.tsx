import { render } from "preact";
import { App } from "./app";
import { entryOf, sameChoice, type Entry, type Origin } from "./catalogue";
import { readEmbedded } from "./recording";
import { compute } from "./recurrence";
import "./style.css";
import type { ServerKernel } from "./views/hooks";

/** The worked example of the project's documents, for a page that holds no recording. */
const EXAMPLE = [
  [2.0, -1.0, 3.0, 0.5, -0.5, 1.5, -2.0, 1.0],
  [4.0, -3.0, 2.5, 1.0, -1.5, 0.0, -0.5, 2.0],
  [-1.0, 3.5, -2.5, 1.5, 0.0, -3.0, 2.5, -0.5],
];

const problems: string[] = [];

async function embedded(id: string, origin: Origin): Promise<Entry[]> {
  try {
    const found = await readEmbedded(document.getElementById(id)?.textContent ?? "null");
    return found.map((each) => entryOf(each, origin));
  } catch (error) {
    problems.push(`The embedded “${id}” cannot be shown: ${(error as Error).message}.`);
    return [];
  }
}

const own = await embedded("recordings", "embedded");
const presets = (await embedded("presets", "preset")).filter((each) => !own.some((one) => sameChoice(one, each)));
const entries = [...own, ...presets];
if (entries.length === 0) {
  for (const kernel of ["online", "three_pass"] as const) entries.push(entryOf(compute(kernel, EXAMPLE, 4), "computed"));
}
const served = JSON.parse(document.getElementById("server")?.textContent ?? "null") as { kernels: ServerKernel[] } | null;
render(<App entries={entries} problem={problems.join(" ")} server={served?.kernels ?? null} />, document.getElementById("app")!);
