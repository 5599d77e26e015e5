// The page's own modules, for tests that run without a browser.
import { build } from "esbuild";

/** A module of src/, with what it imports. */
export async function load(name) {
  const { outputFiles } = await build({
    entryPoints: [new URL(`../src/${name}`, import.meta.url).pathname],
    bundle: true,
    write: false,
    format: "esm",
    logLevel: "error",
  });
  return import(`data:text/javascript;base64,${Buffer.from(outputFiles[0].contents).toString("base64")}`);
}
