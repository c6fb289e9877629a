#!/bin/sh
# Install the other implementations our tests talk to, each in a folder of its own under .peers.
#
# Never fails: a peer that cannot be had is missing, and the tests that need it say so when they are skipped
# (or fail, under HANDRAIL_REQUIRE_PEERS=1). A peer that is already there is left alone. The reason for a
# missing one is kept in .peers/<name>.log. `install.sh upstreams` installs the servers of tests/peers/upstreams too, and
# `install.sh bench` what only the benchmarks need.

cd "$(dirname "$0")/../.." || exit 0
UV=${UV:-uv}
PYTHON=${PYTHON:-.venv/bin/python}
WAIT=${HANDRAIL_PEERS_SECONDS:-180}
mkdir -p .peers/upstreams || exit 0

limited() {
    if command -v timeout >/dev/null 2>&1; then timeout "$WAIT" "$@"; else "$@"; fi
}

# A peer is ready when its stamp equals what it was installed from.
ready() {
    cmp -s "$1" "$2/.ready" 2>/dev/null
}

python_peer() {
    wanted=tests/peers/$1.txt
    folder=.peers/$1
    if ready "$wanted" "$folder" && "$folder/bin/python" -c "" 2>/dev/null; then return; fi
    rm -rf "$folder"
    if {
        limited "$UV" venv -q --python "$PYTHON" "$folder" &&
        limited "$UV" pip sync -q --python "$folder/bin/python" --require-hashes "$wanted" &&
        cp "$wanted" "$folder/.ready"
    } >".peers/$1.log" 2>&1; then
        rm -f ".peers/$1.log"
        echo "peers: $1 installed"
    else
        rm -rf "$folder"
        echo "peers: $1 could not be installed: $(tail -n 1 ".peers/$1.log")"
    fi
}

# Inspector and conformance suite need Node 22.19 or newer; the registry has the binary itself, for Linux on x64. A second copy of it
# (the TypeScript client brings one too) is the price of peers that do not depend on each other.
# Not `npm ci`: the lock leaves out the optional packages of other platforms, which `ci` takes for a mistake.
node_peer() {
    from=${2:-tests/peers/$1}
    wanted=$from/package-lock.json
    folder=.peers/$1
    if ready "$wanted" "$folder"; then return; fi
    if ! command -v npm >/dev/null 2>&1; then
        echo "npm is not installed" | tee ".peers/$1.log" | sed "s/^/peers: no $1: /"
        return
    fi
    if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
        echo "only set up for Linux on x64" | tee ".peers/$1.log" | sed "s/^/peers: no $1: /"
        return
    fi
    rm -rf "$folder"
    if {
        mkdir -p "$folder" &&
        cp "$from/package.json" "$wanted" "$folder/" &&
        (cd "$folder" && limited npm install --ignore-scripts --no-audit --no-fund --loglevel=error) &&
        cp "$wanted" "$folder/.ready"
    } >".peers/$1.log" 2>&1; then
        rm -f ".peers/$1.log"
        echo "peers: $1 installed"
    else
        rm -rf "$folder"
        echo "peers: $1 could not be installed: $(tail -n 1 ".peers/$1.log")"
    fi
}

# What comes from the system, where it may be installed.
package() {
    if command -v "${2:-$1}" >/dev/null 2>&1; then return; fi
    if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" != 0 ]; then
        echo "peers: no $1: it can be installed by root, with apt-get"
        return
    fi
    # At run level 1 no service is started: the tests start their own.
    install="limited env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $1"
    if { $install || { limited apt-get update -q && $install; }; } >".peers/$1.log" 2>&1; then
        rm -f ".peers/$1.log"
        echo "peers: $1 installed"
    else
        echo "peers: $1 could not be installed: $(tail -n 1 ".peers/$1.log")"
    fi
}

package tmux     # a terminal for the tests of the command line
# A browser for those of the console. The one without windows takes a third of the time; not every system has it.
command -v chromium-headless-shell >/dev/null 2>&1 || package chromium
if apt-cache show chromium-headless-shell >/dev/null 2>&1; then package chromium-headless-shell; fi
package redis-server
package postgresql /usr/lib/postgresql/*/bin/initdb # what replicas share
package nginx-light nginx                           # what stands before them

python_peer mcp2 &
python_peer mcp1 &
python_peer fastmcp &
node_peer inspector &
node_peer typescript &
node_peer conformance &
node_peer servers-npm &
node_peer web web & # what the console is built with
python_peer upstreams/mcp-server-calculator & # the smallest of those behind the gateway
python_peer upstreams/mcp-server-time &
wait
[ "${1:-}" = bench ] && python_peer mcp-proxy # what only the benchmarks compare with
[ "${1:-}" = upstreams ] || exit 0

python_peer upstreams/excel-mcp-server &
python_peer upstreams/mcp-server-git &
python_peer upstreams/mcp-server-motherduck &
python_peer upstreams/mcp-server-sqlite &
python_peer upstreams/redis-mcp-server &
node_peer upstreams/sequential-thinking &
wait
exit 0
