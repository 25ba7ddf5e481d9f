import { existsSync, readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { defineConfig, type Plugin } from "vite";
import { viteSingleFile } from "vite-plugin-singlefile";

const trace = new URL("../src/fused_softmax/trace/", import.meta.url);
const presets = new URL("presets.json", trace);

/** Embeds the recordings that ship with the page while it is developed. `page.py` embeds them in what users open. */
function embedPresets(): Plugin {
  return {
    name: "embed-presets",
    apply: "serve",
    transformIndexHtml(html) {
      const text = existsSync(presets) ? JSON.stringify(JSON.parse(readFileSync(presets, "utf8"))) : "null";
      const slot = '<script id="presets" type="application/json">';
      return html.replace(`${slot}null`, () => slot + text.replaceAll("<", "\\u003c"));
    },
  };
}

/** Writes the page under its own name, beside the recorder. */
function named(): Plugin {
  return {
    name: "named",
    enforce: "post",
    generateBundle(_, bundle) {
      for (const file of Object.values(bundle)) if (file.fileName === "index.html") file.fileName = "page.html";
    },
  };
}

export default defineConfig({
  plugins: [embedPresets(), viteSingleFile({ removeViteModuleLoader: true }), named()],
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    outDir: process.env["PAGE_OUT"] ?? fileURLToPath(trace),
    emptyOutDir: false,
    target: "es2022",
    modulePreload: false,
    reportCompressedSize: false,
  },
  test: { include: ["tests/**/*.test.ts"] },
} as Parameters<typeof defineConfig>[0]);
