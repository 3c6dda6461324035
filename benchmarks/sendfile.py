"""A file server that does nothing but HTTP/1.1 keep-alive and sendfile: the floor for serving chunks."""

from __future__ import annotations

import os
import socketserver
import sys
from pathlib import Path


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        root = Path(sys.argv[1])
        while request := self.rfile.readline():
            while self.rfile.readline().strip():
                pass
            name = request.split()[1].decode().lstrip("/")
            if not name:
                self.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                continue
            with (root / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
                self.connection.sendfile(file)


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
