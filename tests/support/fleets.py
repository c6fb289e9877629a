"""Replicas of one server as they are deployed: processes without anything in common but Redis, nginx before them."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
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


@contextmanager
def nginx(*urls: str) -> Iterator[str]:
    """Round robin before some endpoints; yields the URL of the one that clients use."""
    path, port = require_nginx(), free_port()
    with tempfile.TemporaryDirectory(prefix="handrail-nginx-") as folder:
        servers = " ".join(f"server {urlsplit(url).netloc} max_fails=0;" for url in urls)
        config = Path(folder) / "nginx.conf"
        config.write_text(NGINX.format(folder=folder, servers=servers, port=port))
        process = subprocess.Popen([path, "-e", f"{folder}/error.log", "-p", folder, "-c", str(config)])
        try:
            until(lambda: _listens(port), "nginx")
            yield f"http://127.0.0.1:{port}{urlsplit(urls[0]).path}"
        finally:
            process.terminate()
            process.wait(PATIENCE)


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

    def balanced(self) -> str:
        return self._stack.enter_context(nginx(*(each.endpoint for each in self.replicas)))

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
