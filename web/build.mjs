// Builds the page into the folder that the server embeds, or another one: node build.mjs [FOLDER]. The result depends on
// the sources and the lock file alone.
import { build } from "esbuild";
import { copyFile, readFile } from "node:fs/promises";
import { resolve } from "node:path";

const assets = process.argv[2] ? `${resolve(process.argv[2])}/` : new URL("../crates/forebay-server/assets/", import.meta.url).pathname;
const here = new URL("./", import.meta.url).pathname;

// The licence of what is bundled asks to come along.
const licence = await readFile(new URL("./node_modules/preact/LICENSE", import.meta.url), "utf8");
const notice = `/* Forebay, Apache-2.0. It holds Preact:\n\n${licence.trim()} */`;

await build({
  absWorkingDir: here,
  entryPoints: { app: "src/main.tsx" },
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  banner: { js: notice },
  charset: "utf8",
  outdir: assets,
  logLevel: "warning",
});
await build({
  absWorkingDir: here,
  entryPoints: { app: "src/app.css" },
  minify: true,
  target: ["chrome120", "firefox120", "safari17"],
  outdir: assets,
  logLevel: "warning",
});
for (const name of ["index.html", "icon.svg"]) await copyFile(`${here}src/${name}`, assets + name);
