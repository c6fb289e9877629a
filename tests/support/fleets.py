"""Replicas of one server as they are deployed: processes without anything in common but Redis, nginx before them."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from consoles import Served, serving
from patience import PATIENCE
from redis_servers import free_port, until

SERVER = Path(__file__).parent / "servers_fleet.py"
NGINX = """
pid {folder}/pid;
error_log {folder}/error.log;
worker_processes 1;
daemon off;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  keepalive_timeout 0;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream replicas {{ {servers} }}
  server {{
    listen 127.0.0.1:{port};
    client_max_body_size 8m;
    location / {{
      proxy_pass http://replicas;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $http_host;
      proxy_buffering off;
      proxy_read_timeout 1h;
      proxy_connect_timeout 2s;
      proxy_next_upstream error timeout http_503;
    }}
  }}
}}
"""


def require_nginx() -> str:
    """Return the path of nginx. Without one the test is skipped, or fails where none may be missing."""
    path = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if path is None:
        reason = "nginx is not installed: run make peers"
        if os.environ.get("HANDRAIL_REQUIRE_PEERS") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return path


def _listens(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 1):
        return True


class Nginx:
    """Round robin before some endpoints, in a process of its own."""

    def __init__(self, folder: Path, urls: Sequence[str]) -> None:
        self._config, self._port = folder / "nginx.conf", free_port()
        self.url = f"http://127.0.0.1:{self._port}{urlsplit(urls[0]).path}"
        self._configure(urls)
        command = [require_nginx(), "-e", f"{folder}/error.log", "-p", str(folder), "-c", str(self._config)]
        self._process = subprocess.Popen(command)
        until(lambda: _listens(self._port), "nginx")

    def _configure(self, urls: Sequence[str]) -> None:
        servers = " ".join(f"server {urlsplit(url).netloc} max_fails=0;" for url in urls)
        self._config.write_text(NGINX.format(folder=self._config.parent, servers=servers, port=self._port))

    def lead_to(self, *urls: str) -> None:
        """Send new requests to these endpoints only, as an orchestrator does before it stops a replica."""
        before = self._workers()
        self._configure(urls)
        self._process.send_signal(signal.SIGHUP)
        until(lambda: not before & self._workers() and self._workers(), "nginx has read its configuration")

    def _workers(self) -> set[int]:
        """Return the processes that accept connections."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        titles = {int(pid): _title(int(pid)) for pid in children}
        return {pid for pid, title in titles.items() if "worker process" in title and "shutting down" not in title}

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except OSError:
        return ""


class Fleet:
    """Replicas that share a store, each with a home of its own, and the one URL of all."""

    def __init__(self, folder: Path, store: str, stack: ExitStack, *words: str, key: str = "", **options: Any) -> None:
        self.folder, self.store, self.words, self.options = folder, store, words, options
        self.key = key or secrets.token_hex(32)
        self.replicas: list[Served] = []
        self._stack = stack

    @property
    def env(self) -> dict[str, str]:
        return {"HANDRAIL_KEY": self.key, "HANDRAIL_STORE": self.store, "FLEET_FOLDER": str(self.folder)}

    def add(self, *words: str, **env: str) -> Served:
        home = self.folder / f"home-{len(self.replicas)}"
        home.mkdir()
        options = {"target": SERVER, **self.options}
        replica = self._stack.enter_context(serving(home, *self.words, *words, env={**self.env, **env}, **options))
        self.replicas.append(replica)
        return replica

    def balancer(self) -> Nginx:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="handrail-nginx-")))
        balancer = Nginx(folder, [each.endpoint for each in self.replicas])
        self._stack.callback(balancer.stop)
        return balancer

    def balanced(self) -> str:
        return self.balancer().url

    @property
    def runs(self) -> list[str]:
        """Which process ran `pay`, a line each time, in the order of the runs."""
        file = self.folder / "runs"
        return file.read_text().splitlines() if file.exists() else []


SETTINGS = """
[store]
accept_loss = true

[limits]
principal = ""
address = ""
lists = ""
"""


@contextmanager
def fleet(folder: Path, store: str, count: int = 3, settings: str = SETTINGS, **options: Any) -> Iterator[Fleet]:
    """`count` replicas that run."""
    with ExitStack() as stack:
        made = Fleet(folder, store, stack, settings=settings, **options)
        for _ in range(count):
            made.add()
        yield made
