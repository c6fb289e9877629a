import { render } from "preact";
import { signIn } from "./api-client";
import { App } from "./app";
import { go, route } from "./route";
import { load } from "./screens";
// One sheet for all screens, in this order: what is said last counts, whichever screen is loaded first.
import "./tools.css";
import "./approve.css";
import "./screens/call.css";
import "./screens/audit.css";
import "./screens/table.css";
import "./screens/now.css";
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
load(route.value.screen).catch(() => {}); // while we sign in; if it fails, the screen says so
void signIn(code).then(() => render(<App />, document.getElementById("app")!)); // until then: what index.html has
