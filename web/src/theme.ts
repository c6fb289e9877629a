// Light or dark: as the system says, or as somebody chose here.
import { Cell } from "./cell";

export type Theme = "system" | "light" | "dark";
export const THEMES: Theme[] = ["system", "light", "dark"];
export const theme = new Cell<Theme>(remembered());
/** Counts how often the colours have changed: for what is painted by script. */
export const painted = new Cell(0);
paint(theme.value);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => painted.set(painted.value + 1));

export function pick(one: Theme): void {
  paint(one);
  theme.set(one);
  painted.set(painted.value + 1);
  try {
    localStorage.setItem("handrail-theme", one);
  } catch {
    // it is kept as long as the page is
  }
}

function remembered(): Theme {
  try {
    return THEMES.find((one) => one === localStorage.getItem("handrail-theme")) ?? "system";
  } catch {
    return "system"; // storage may be closed to us
  }
}

function paint(one: Theme): void {
  if (one === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = one;
}
