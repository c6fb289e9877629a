// A small chart over the minutes of the last hour: drawn by hand, for a chart library would be a third of the page.
import { useMemo, useRef } from "preact/hooks";

const SLOTS = 61;

interface Props {
  values: number[]; // the last is going on
  bars?: boolean;
  tone: "info" | "bad" | "quiet";
  label: string;
  point: number | null; // which value is looked at, counted from the end
  onPoint: (point: number | null) => void;
}

export function Spark({ values, bars, tone, label, point, onPoint }: Props) {
  const box = useRef<SVGSVGElement>(null);
  const [path, area] = useMemo(() => drawn(values, bars), [values, bars]);
  const look = (event: PointerEvent) => {
    const { left, width } = box.current!.getBoundingClientRect();
    const back = SLOTS - 1 - Math.floor(((event.clientX - left) / width) * SLOTS);
    onPoint(back >= 0 && back < values.length ? back : null);
  };
  return (
    <svg ref={box} class={`spark ${tone}`} viewBox={`0 0 ${SLOTS} 100`} preserveAspectRatio="none" role="img" aria-label={label} onPointerMove={look} onPointerLeave={() => onPoint(null)}>
      {point !== null && <path class="spark-cursor" d={`M${SLOTS - point - 1} 0h1v100h-1z`} />}
      {area && <path class="spark-area" d={area} />}
      <path class={bars ? "spark-bars" : "spark-line"} d={path} />
      <path class="spark-base" d={`M0 100h${SLOTS}`} />
    </svg>
  );
}

function drawn(values: number[], bars?: boolean): [path: string, area: string] {
  const most = Math.max(1e-9, ...values) * 1.04;
  const height = (value: number) => Math.round(1000 * (1 - value / most)) / 10;
  const first = SLOTS - values.length;
  if (bars) return [values.map((value, index) => (value ? `M${first + index + 0.12} 100V${Math.min(97, height(value))}h.76V100z` : "")).join(""), ""];
  const points = values.map((value, index) => `${first + index + 0.5} ${height(value)}`);
  if (!points.length) return ["", ""];
  return [`M${points.join("L")}`, `M${first + 0.5} 100L${points.join("L")}V100z`];
}
