"""A file server that does nothing but HTTP/1.1 keep-alive and sendfile: the floor for serving chunks.

With ``--hash`` it reads every file into reused memory and hashes it before it sends that: the floor for
serving chunks that the server itself has checked.
"""

from __future__ import annotations

import os
import socketserver
import sys
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

PIECE = 2**20


class Handler(socketserver.StreamRequestHandler):
    memory = memoryview(b"")

    def handle(self) -> None:
        root = Path(sys.argv[1])
        send = self._send_hashed if "--hash" in sys.argv else self.connection.sendfile
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
                send(file)

    def _send_hashed(self, file: BinaryIO) -> None:
        size = os.fstat(file.fileno()).st_size
        if size > len(self.memory):
            self.memory = memoryview(bytearray(size))
        hasher = blake3()
        for start in range(0, size, PIECE):
            piece = self.memory[start : min(start + PIECE, size)]
            os.readv(file.fileno(), [piece])
            hasher.update(piece)
        hasher.digest()
        self.connection.sendall(self.memory[:size])


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
