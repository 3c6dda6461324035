"""A server that answers requests with any bytes at all."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

Say = Callable[[str, int, dict[str, str], BinaryIO], object]


@contextmanager
def raw_server(say: Say) -> Iterator[str]:
    """URL of a server on a free loopback port.

    Parameters
    ----------
    say
        Given a request's target, its number from 1 on, its headers with names in small letters, and the stream to write
        the answer to. The connection is closed if it returns False.
    """
    asked = [0]

    class Handler(socketserver.StreamRequestHandler):
        wbufsize = 0

        def handle(self) -> None:
            while line := self.rfile.readline():
                headers: dict[str, str] = {}
                while (field := self.rfile.readline().decode().strip()) != "":
                    name, _, value = field.partition(":")
                    headers[name.lower()] = value.strip()
                asked[0] += 1
                try:
                    if say(line.split()[1].decode(), asked[0], headers, self.wfile) is False:
                        return
                except OSError:
                    return

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def answer(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    """A whole answer; in names of headers `_` stands for `-`."""
    named = {"Content-Length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body
