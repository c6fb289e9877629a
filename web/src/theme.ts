// Light or dark: as the system says, or as somebody chose here.
import { Cell } from "./cell";

export type Theme = "system" | "light" | "dark";
export const THEMES: Theme[] = ["system", "light", "dark"];
export const theme = new Cell<Theme>(remembered());
paint(theme.value);

export function pick(one: Theme): void {
  paint(one);
  theme.set(one);
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
