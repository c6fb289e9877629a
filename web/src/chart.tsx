// A small chart of the minutes of the last hour, drawn by uPlot in the colours of the theme.
import { useLayoutEffect, useMemo, useRef } from "preact/hooks";
import uPlot from "uplot";
import { use } from "./cell";
import { MINUTES } from "./live";
import { painted } from "./theme";

const AGO = Array.from({ length: MINUTES }, (_, slot) => slot + 1 - MINUTES); // up to 0, which is going on
const LEAST = 0.03; // of the height: what is not nothing is seen

interface Props {
  values: (number | null)[]; // the last is going on; null: there is nothing to tell of that minute
  bars?: boolean;
  tone: "info" | "bad" | "quiet";
  label: string;
  point: number | null; // which value is looked at, counted from the end
  onPoint: (point: number | null) => void;
}

export function Chart({ values, bars, tone, label, point, onPoint }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const look = use(painted);
  const data = useMemo(() => placed(values), [values]);
  useLayoutEffect(() => {
    const element = box.current!;
    const size = () => ({ width: element.clientWidth, height: element.clientHeight });
    const made = (plot.current = new uPlot({ ...options(bars), ...size() }, undefined, element));
    const watcher = new ResizeObserver(() => made.setSize(size()));
    watcher.observe(element);
    return () => {
      watcher.disconnect();
      made.destroy();
    };
  }, []);
  useLayoutEffect(() => plot.current!.setData(data), [data, look]);
  useLayoutEffect(() => {
    const left = point === null ? -1 : plot.current!.valToPos(-point, "x");
    plot.current!.setCursor({ left, top: 0 }, false);
  }, [data, point]);
  const at = (event: PointerEvent) => {
    const { left, width } = box.current!.getBoundingClientRect();
    const back = MINUTES - 1 - Math.floor(((event.clientX - left) / width) * MINUTES);
    onPoint(back >= 0 && back < values.length ? back : null);
  };
  return <div ref={box} class={`chart ${tone}`} role="img" aria-label={label} onPointerMove={at} onPointerLeave={() => onPoint(null)} />;
}

function placed(values: (number | null)[]): uPlot.AlignedData {
  const least = LEAST * Math.max(0, ...values.map(Number));
  const shown = values.map((value) => value && Math.max(value, least));
  return [AGO, [...Array<null>(MINUTES - shown.length).fill(null), ...shown]];
}

function options(bars?: boolean): Omit<uPlot.Options, "width" | "height"> {
  const tone = (plot: uPlot) => getComputedStyle(plot.root).color;
  const faint = (plot: uPlot) => tone(plot).replace(/^rgb\((.*)\)$/, "rgba($1, 0.14)");
  return {
    scales: {
      x: { time: false, range: [0.5 - MINUTES, 0.5] },
      y: { range: (_plot, _least, most) => [0, (most || 1) * 1.04] },
    },
    axes: [{ show: false }, { show: false }],
    legend: { show: false },
    padding: [0, 0, 0, 0],
    cursor: { y: false, points: bars ? { show: false } : { size: 7 } }, // moved by us: one for all charts, and for the keyboard
    series: [
      {},
      bars
        ? { fill: tone, width: 0, paths: uPlot.paths.bars!({ size: [0.76] }), points: { show: false } }
        : { stroke: tone, fill: faint, width: 1.5, points: { size: 4, width: 0, fill: tone, filter: alone } },
    ],
  };
}

/** The minutes between two of which there is nothing to tell: a line does not show them. */
function alone(plot: uPlot, series: number): number[] {
  const values = plot.data[series]!;
  return AGO.map((_, slot) => slot).filter((slot) => values[slot] != null && values[slot - 1] == null && values[slot + 1] == null);
}
