// Several server scenarios outside their window, in one process: the suite itself forces one a process.
//
// Run as `node forced.mjs <the suite's index.js> <scenarios, separated by commas> <options of its server command>`.

import { pathToFileURL } from "node:url";

const [node, , suite, scenarios, ...options] = process.argv;
const { exit } = process;
let failed = 0;
for (const scenario of scenarios.split(",")) {
  process.argv = [node, suite, "server", "--scenario", scenario, "--force", ...options];
  const ended = new Promise((resolve) => (process.exit = resolve));
  await import(`${pathToFileURL(suite)}?${scenario}`); // another instance of it, which reads the arguments and begins
  failed |= await ended;
}
exit(failed);
