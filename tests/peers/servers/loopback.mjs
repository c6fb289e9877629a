// For `node --import`: a server that would listen on every interface, on a port of its choice, listens on loopback only,
// on any free port, and says which in a line of its own.

import net from "node:net";

const { listen } = net.Server.prototype;

net.Server.prototype.listen = function (_port, ...rest) {
  this.once("listening", () => console.log(`http://127.0.0.1:${this.address().port}`));
  return listen.call(this, 0, "127.0.0.1", ...rest);
};
