import { render } from "preact";
import { signIn } from "./api-client";
import { App } from "./app";
import { go } from "./route";
import "./style.css";

/** Take the code of a start link out of the address bar and the history, before anything else happens with it. */
function taken(): string {
  const code = /^#code=([^&]+)/.exec(location.hash)?.[1] ?? "";
  if (code) go("#/now", true);
  return code;
}

const code = taken();
window.addEventListener("hashchange", () => {
  const another = taken(); // a fresh link, opened in a page that is there already
  if (another) void signIn(another);
});
void signIn(code).then(() => render(<App />, document.getElementById("app")!)); // until then: what index.html has
