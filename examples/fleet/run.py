"""A fleet on this machine: Redis, PostgreSQL, three replicas behind nginx, load, and one replica killed.

    python examples/fleet/run.py        10 seconds of load; SECONDS=60 for longer

It needs redis-server, PostgreSQL and nginx, which `make fleet` installs where it may. All of it lives in a temporary
folder and on free ports, and goes with it. It ends with 0 if no call was lost and the audit log is whole.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from handrail import Client, HandrailError

HERE = Path(__file__).parent.resolve()
REPLICAS = 3
CALLERS = 16
START_SECONDS = 30.0
NGINX = """
pid {folder}/nginx.pid; error_log {folder}/nginx.log; daemon off;
events {{ }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream replicas {{ {servers} }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://replicas; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_set_header Host $http_host; proxy_buffering off; proxy_read_timeout 1h; proxy_connect_timeout 2s;
    }}
  }}
}}
"""


def program(name: str, *folders: str) -> str:
    """Return the path of a program, also where Debian puts it beside the usual path."""
    path = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))
    if path is None:
        raise SystemExit(f"{name} is missing: apt-get install redis-server postgresql nginx-light")
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + START_SECONDS
    while not is_so():
        if time.monotonic() > end:
            raise SystemExit(f"{what} did not start within {START_SECONDS:g} s")
        time.sleep(0.05)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def running(*words: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with this one; what it writes to standard error goes beside its folder."""
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env, cwd=cwd, start_new_session=True
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def redis(folder: Path) -> Iterator[str]:
    port = free_port()
    settings = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "yes", "--appendfsync", "always")
    with running(program("redis-server"), "--port", str(port), "--dir", str(folder), *settings):
        wait_until(lambda: listens(port), "redis-server")
        yield f"redis://127.0.0.1:{port}"


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """PostgreSQL refuses to run as root: it is another user's then."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    binaries = Path(program("initdb", *map(str, debian))).resolve().parent
    data, port, as_user = folder / "postgres", free_port(), list[str]()
    data.mkdir()
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(data, nobody.pw_uid, nobody.pw_gid)
        as_user = ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
    initialize = [*as_user, str(binaries / "initdb"), "-D", str(data), "-U", "shop", "-A", "trust", "-E", "UTF8"]
    subprocess.run([*initialize, "--locale=C"], check=True, capture_output=True, cwd="/")
    options = ["-p", str(port), "-k", "", "-c", "listen_addresses=127.0.0.1"]
    with running(*as_user, str(binaries / "postgres"), "-D", str(data), *options, cwd=Path("/")):
        wait_until(lambda: listens(port), "PostgreSQL")
        yield f"postgresql://shop@127.0.0.1:{port}/postgres"


@contextmanager
def nginx(folder: Path, urls: list[str]) -> Iterator[str]:
    port, config = free_port(), folder / "nginx.conf"
    servers = " ".join(f"server {urlsplit(url).netloc} max_fails=1 fail_timeout=1s;" for url in urls)
    config.write_text(NGINX.format(folder=folder, servers=servers, port=port))
    path = program("nginx", "/usr/sbin", "/usr/local/sbin")
    with running(path, "-e", str(folder / "nginx.log"), "-p", str(folder), "-c", str(config)):
        wait_until(lambda: listens(port), "nginx")
        yield f"http://127.0.0.1:{port}/mcp"


def handrail(env: dict[str, str], *words: str) -> str:
    """Run a command as an operator does, on any machine that reaches the store and the audit log."""
    done = subprocess.run([sys.executable, "-m", "handrail", *words], capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"handrail {words[0]}: {done.stderr}")
    return done.stdout


async def call_for(url: str, seconds: float, outcomes: Counter[str]) -> None:
    """Call until the time is over; a call that fails is told apart from one that was never answered."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            async with Client(url) as client:
                while time.monotonic() < end:
                    async with asyncio.timeout(30):
                        result = await client.call("find_order", {"order": 7})
                    outcomes["answered" if not result.result.is_error else "refused"] += 1
        except TimeoutError:
            outcomes["hung"] += 1
        except HandrailError:  # its replica was killed: the call reads only, and may be made again
            outcomes["broken off, and told so"] += 1


async def cancel(url: str) -> str:
    async with Client(url, confirm=lambda *_: True) as client:
        return (await client.call("cancel_order", {"order": 7})).text


async def drive(url: str, seconds: float, replicas: list[subprocess.Popen[str]], env: dict[str, str]) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    callers = [asyncio.create_task(call_for(url, seconds, outcomes)) for _ in range(CALLERS)]
    print(f"{CALLERS} callers for {seconds:g} s …")
    waiting = asyncio.create_task(cancel(url))
    await asyncio.sleep(seconds / 3)
    [approval] = json.loads(await asyncio.to_thread(handrail, env, "approve", "--json"))
    await asyncio.to_thread(handrail, env, "approve", approval["id"], "yes")
    print(f"approved on another machine: {await waiting}")
    os.killpg(replicas[0].pid, signal.SIGKILL)
    print("one replica killed")
    await asyncio.gather(*callers)
    return outcomes


def main() -> int:
    seconds = float(os.environ.get("SECONDS", "10"))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="handrail-fleet-")))
        folder.chmod(0o755)  # PostgreSQL may be another user's
        store, audit = stack.enter_context(redis(folder)), stack.enter_context(postgres(folder))
        env = {**os.environ, "HANDRAIL_KEY": secrets.token_hex(32), "HANDRAIL_STORE": store, "HANDRAIL_AUDIT": audit}
        env["XDG_STATE_HOME"] = str(folder)
        replicas, urls = list[subprocess.Popen[str]](), list[str]()
        for _ in range(REPLICAS):
            words = ("serve", str(HERE / "shop.py"), "--http", "127.0.0.1:0", "--json")
            replica = stack.enter_context(running(sys.executable, "-m", "handrail", *words, env=env))
            assert replica.stdout is not None
            replicas.append(replica)
            urls.append(json.loads(replica.stdout.readline())["url"])
        url = stack.enter_context(nginx(folder, urls))
        print(f"{url} is nginx before {', '.join(urls)}")
        outcomes = asyncio.run(drive(url, seconds, replicas, env))
        print(", ".join(f"{count:,} {name}" for name, count in outcomes.most_common()))
        verified = json.loads(handrail(env, "audit", "verify", audit, "--json").splitlines()[0])
        print(f"audit log: {'whole' if verified['ok'] else 'NOT WHOLE'}, {verified['records']:,} records")
        return 0 if outcomes["answered"] and not outcomes["hung"] and verified["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
