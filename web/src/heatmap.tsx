import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { count, plural } from "./format";
import { decode, describe, fade, grid, IN_MEMORY, LEVELS, paint, palette, USED } from "./heat";
import type { ExpertMap } from "./types";

/** Milliseconds for a glow to fade. */
const FADE = 700;

/** The experts, one pixel each, scaled by the browser. Nothing is drawn while nothing changes. */
export function Heat({ map }: { map: ExpertMap | null }) {
  const shape = useMemo(() => (map ? grid(map.layers) : null), [map && JSON.stringify(map.layers)]);
  const total = shape?.spans.reduce((sum, span) => sum + span.length, 0) ?? 0;
  const cells = useMemo(() => (map?.cells ? decode(map.cells, total) : null), [map?.cells, total]);
  const canvas = useRef<HTMLCanvasElement>(null);
  const glow = useRef(new Uint8Array(0));
  const [at, setAt] = useState<{ row: number; column: number } | null>(null);

  useEffect(() => {
    const target = canvas.current;
    const context = target?.getContext("2d");
    if (!target || !context || !shape || !cells || shape.columns === 0) return;
    target.width = shape.columns;
    target.height = shape.rows;
    const image = context.createImageData(shape.columns, shape.rows);
    const pixels = new Uint32Array(image.data.buffer);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    let colours = palette(scheme.matches);
    if (glow.current.length !== cells.length) glow.current = new Uint8Array(cells.length);
    const levels = glow.current;
    // Where nothing may move, a glow lasts until the next pass.
    cells.forEach((cell, index) => {
      if (cell & USED) levels[index] = LEVELS - 1;
      else if (still) levels[index] = 0;
    });
    const draw = () => {
      paint(pixels, cells, levels, shape, colours);
      context.putImageData(image, 0, 0);
    };
    let frame = 0;
    let before = performance.now();
    const step = (now: number) => {
      const faded = Math.floor(((now - before) / FADE) * LEVELS);
      if (faded > 0) {
        // What is left over counts for the next frame.
        before += (faded * FADE) / LEVELS;
        const left = fade(levels, faded);
        draw();
        if (!left) return;
      }
      frame = requestAnimationFrame(step);
    };
    const onScheme = () => {
      colours = palette(scheme.matches);
      draw();
    };
    draw();
    if (!still) frame = requestAnimationFrame(step);
    scheme.addEventListener("change", onScheme);
    return () => {
      cancelAnimationFrame(frame);
      scheme.removeEventListener("change", onScheme);
    };
  }, [cells, shape]);

  if (!map || !shape || !cells) {
    return (
      <div class="panel">
        <h2>Experts</h2>
        <p class="quiet">{map ? "The engine shows them when the pass that runs is over." : "Nothing is known yet."}</p>
      </div>
    );
  }
  const resident = cells.reduce((sum, cell) => sum + (cell & IN_MEMORY ? 1 : 0), 0);
  const layer = at && map.layers[at.row];
  const span = at && shape.spans[at.row];
  const byte = span && at.column < span.length ? cells[span.start + at.column] : undefined;
  const move = (rows: number, columns: number) =>
    setAt((at) => ({
      row: Math.min(Math.max((at?.row ?? 0) + (at ? rows : 0), 0), shape.rows - 1),
      column: Math.min(Math.max((at?.column ?? 0) + (at ? columns : 0), 0), shape.columns - 1),
    }));
  const keys: Record<string, [number, number]> = {
    ArrowUp: [-1, 0],
    ArrowDown: [1, 0],
    ArrowLeft: [0, -1],
    ArrowRight: [0, 1],
  };
  return (
    <div class="panel heat">
      <h2>Experts, layer by layer</h2>
      <div class="frame">
        <canvas
          ref={canvas}
          class={shape.rows > 24 ? "many" : "few"}
          style={{ aspectRatio: shape.rows > 24 ? `${shape.columns} / ${shape.rows * 1.6}` : undefined, height: shape.rows > 24 ? undefined : `${shape.rows * 16}px` }}
          role="img"
          tabIndex={0}
          aria-label={`${count(resident)} of ${plural(total, "expert")} are in memory, in ${plural(shape.rows, "layer")}. Arrow keys move from expert to expert.`}
          aria-describedby="readout"
          onPointerMove={(event) => {
            const { left, top, width, height } = event.currentTarget.getBoundingClientRect();
            const row = Math.floor(((event.clientY - top) / height) * shape.rows);
            const column = Math.floor(((event.clientX - left) / width) * shape.columns);
            if (row >= 0 && row < shape.rows && column >= 0 && column < shape.columns) setAt({ row, column });
          }}
          onPointerLeave={() => setAt(null)}
          onBlur={() => setAt(null)}
          onKeyDown={(event) => {
            const step = keys[event.key];
            if (!step) return;
            event.preventDefault();
            move(...step);
          }}
        />
        {at && (
          <i
            class="cursor"
            aria-hidden="true"
            style={{
              left: `${(100 * at.column) / shape.columns}%`,
              top: `${(100 * at.row) / shape.rows}%`,
              width: `${100 / shape.columns}%`,
              height: `${100 / shape.rows}%`,
            }}
          />
        )}
      </div>
      <p id="readout" class="readout" aria-live="polite">
        {layer && byte !== undefined ? (
          <>
            <b>
              {layer.mtp ? "MTP layer" : `Layer ${layer.layer}`}, expert {at.column}
            </b>
            : {describe(byte)}
          </>
        ) : (
          <>
            <i class="key memory" aria-hidden="true" /> in memory <i class="key stored" aria-hidden="true" /> on disk only{" "}
            <i class="key glow" aria-hidden="true" /> just used · stronger: used more since you look
          </>
        )}
      </p>
      <details>
        <summary>As a table</summary>
        <div class="scroll" tabIndex={0} role="region" aria-label="Experts by layer">
          <table class="numbers">
            <thead>
              <tr>
                <th scope="col">Layer</th>
                <th scope="col">in memory</th>
                <th scope="col">slots</th>
                <th scope="col">experts</th>
                <th scope="col">used since you look</th>
              </tr>
            </thead>
            <tbody>
              {map.layers.map((layer, row) => {
                const { start, length } = shape.spans[row] ?? { start: 0, length: 0 };
                const own = cells.subarray(start, start + length);
                return (
                  <tr key={layer.layer}>
                    <th scope="row">{layer.mtp ? "MTP" : layer.layer}</th>
                    <td>{own.reduce((sum, cell) => sum + (cell & IN_MEMORY ? 1 : 0), 0)}</td>
                    <td>{layer.slots}</td>
                    <td>{layer.experts}</td>
                    <td>{own.reduce((sum, cell) => sum + (cell & 0x3f ? 1 : 0), 0)}</td>
                  </tr>
                );
              })}
            </tbody>
          </table>
        </div>
      </details>
    </div>
  );
}
