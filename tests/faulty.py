"""A proxy in front of an S3 server that loses, delays and breaks what passes through it."""

from __future__ import annotations

import http.client
import socket
import ssl
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

KINDS = ("error", "applied-error", "drop", "lost", "reset", "stall", "body-stall", "late")

_BUSY = b"<?xml version='1.0'?><Error><Code>%b</Code><Message>come again</Message></Error>"


@dataclass
class Faults:
    """What the proxy does; a test may change ``choose`` at any time.

    Parameters
    ----------
    url
        Where the proxy listens.
    choose
        Given method and path of a request, which fault it meets:

        ``error``, answered 503 and not passed on; ``applied-error``, passed on and answered 500; ``drop``, closed and not
        passed on; ``lost``, passed on and never answered; ``reset``, cut in the middle of the answer's body; ``stall``, not passed on
        and never answered; ``body-stall``, no end of the answer's body; ``late``, passed on, answered never.
    instead
        Given method and path of a request, what is answered in the server's place, if anything: status, media type and body.
    stall_s
        How long a stalled request is held before its connection is closed.
    hear
        Given the headers of every request, their names in small letters.
    obey
        Given method, path and headers of a request: true if it was carried out in another way, and is to be answered 200.
    requests
        Method, path and Range of every request, in order.
    """

    url: str
    choose: Callable[[str, str], str | None] = lambda *_: None
    instead: Callable[[str, str], tuple[int, str, bytes] | None] = lambda *_: None
    stall_s: float = 60
    hear: Callable[[dict[str, str]], object] = lambda _: None
    obey: Callable[[str, str, dict[str, str]], bool] = lambda *_: False
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)
    ended: threading.Event = field(default_factory=threading.Event)

    def once(self, kind: str, method: str, times: int = 1) -> None:
        """Let the next requests of a method meet a fault, and no other."""
        left = [kind] * times

        def choose(asked: str, _: str) -> str | None:
            return left.pop() if asked == method and left else None

        self.choose = choose


@contextmanager
def faulty(url: str, tls: ssl.SSLContext | None = None) -> Iterator[Faults]:
    """A proxy in front of the server at ``url``, on a free loopback port, and behind TLS if asked."""
    upstream = urlsplit(url).netloc

    class Handler(_Handler):
        server_netloc = upstream

    server = _Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    faults = Faults(f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}")
    Handler.faults = faults
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield faults
    finally:
        faults.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """Connections break here on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_netloc = ""
    faults: Faults

    def log_message(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self._pass_on
        raise AttributeError(name)

    def _pass_on(self) -> None:
        faults = self.faults
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        faults.requests.append((self.command, self.path, self.headers.get("Range")))
        headers = {name.lower(): value for name, value in self.headers.items()}
        faults.hear(headers)
        if faults.obey(self.command, self.path, headers):
            self._answer(200, [], b"")
            return
        if (stranger := faults.instead(self.command, self.path)) is not None:
            status, media_type, said = stranger
            self._answer(status, [("Content-Type", media_type)] if media_type else [], said)
            return
        kind = faults.choose(self.command, self.path)
        if kind is not None:
            faults.met[kind] += 1
        if kind == "error":
            self._answer(503, [], _BUSY % b"SlowDown")
            return
        if kind in ("drop", "stall"):
            self._hold(kind)
            return
        status, found, answer = self._ask(body)
        if kind == "applied-error":
            self._answer(500, [], _BUSY % b"InternalError")
        elif kind in ("lost", "late"):
            self._hold("stall" if kind == "late" else kind)
        elif kind in ("reset", "body-stall") and len(answer) > 1:
            self._answer(status, found, answer, len(answer) // 2)
            self._hold("stall" if kind == "body-stall" else "reset")
        else:
            self._answer(status, found, answer)

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.server_netloc, timeout=120)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in {"connection", "expect"}:
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, sent: int | None = None) -> None:
        self.send_response_only(status)
        names = {"connection", "transfer-encoding"} | ({"content-length"} if self.command != "HEAD" else set())
        for name, value in headers:
            if name.lower() not in names:
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])

    def _hold(self, kind: str) -> None:
        """End the connection: at once, with a reset, or after a long silence."""
        self.close_connection = True
        if kind == "stall":
            self.faults.ended.wait(self.faults.stall_s)
        if kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
