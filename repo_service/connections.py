"""Blocking HTTP connections to one server: kept open, shared by threads, every wait bounded.

`http.client` does the protocol. A request costs a quarter of the time that it costs through urllib3, which at
the rates of a local network is a fifth of all that a chunk costs.
"""

from __future__ import annotations

import http.client
import io
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from http.client import HTTPResponse
from ipaddress import ip_address
from typing import Any, Protocol, TypeVar

from typing_extensions import Buffer

PIECE = 512 * 1024
"""Bytes that are received at once; they are hashed while they still lie in the core's cache."""

# Answers that announce another one, before which the server must have lost its way.
_MAX_INTERIM = 16


T = TypeVar("T")


class Unconnected(OSError):
    """No connection could be made, so that nothing was sent."""


class Timing(Protocol):
    """How long the parts of one exchange may take."""

    def wait_s(self) -> float:
        """Longest wait for the next bytes; raises where the time is over."""
        ...

    def late(self) -> Exception:
        """What to raise for a wait that was as long."""
        ...

    def moved(self, count: int) -> None:
        """Bytes were sent or have come."""
        ...

    def sent(self) -> None:
        """The request is out; from now on its answer is waited for."""
        ...


class Answer(Protocol):
    """What gives the body of an answer."""

    def readinto(self, buffer: memoryview, /) -> int: ...


class Pool:
    """Connections to one server. Methods may be called from several threads, and after a fork.

    Parameters
    ----------
    host, port
        The server's; without a port, the scheme's own.
    context
        Whom to trust, for TLS; without one the connections are plain.
    keep
        Connections kept open; more threads than that open and close their own.
    """

    def __init__(self, host: str, port: int | None, context: ssl.SSLContext | None = None, *, keep: int = 64) -> None:
        self._is_named = not _is_address(host)
        self._new = partial(_Secure, host, port, context=context) if context else partial(_Plain, host, port)
        self._keep = keep
        self._idle: list[_Plain | _Secure] = []
        self._process = os.getpid()

    @contextmanager
    def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        timing: Timing,
        *,
        body: Buffer | None = None,
        connect_s: float,
    ) -> Iterator[HTTPResponse]:
        """Send a request; its answer is there inside the block.

        A connection is used again only if its answer was read to the end and nothing came beyond it.

        Raises
        ------
        Unconnected, ssl.SSLCertVerificationError
            Nothing was sent.
        OSError, http.client.HTTPException
            And what ``timing`` raises.
        """
        connection, process = self._connected(min(connect_s, timing.wait_s())), os.getpid()
        whole = False
        try:
            answer = connection.exchange(method, target, headers, body, timing)
            try:
                yield answer
            finally:
                whole = (answer.isclosed() or answer.length == 0) and not answer.will_close
                answer.close()
                whole = whole and not answer.has_surplus and os.getpid() == process
        finally:
            if whole and len(self._idle) < self._keep:
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Close the connections that nobody uses; a later request opens new ones."""
        while (connection := self._taken()) is not None:
            connection.close()

    def __del__(self) -> None:
        self.close()

    def _connected(self, seconds: float) -> _Plain | _Secure:
        while (connection := self._taken()) is not None:
            if not _is_dropped(connection.sock):
                return connection
            connection.close()
        connection = self._new()
        connection.timeout = seconds
        try:
            if self._is_named:
                # Names are looked up without a limit of time, and every address of one is tried.
                connecting = in_thread(connection.connect)
                try:
                    connecting.result(seconds)
                except TimeoutError:
                    connecting.add_done_callback(lambda _: connection.close())
                    raise
            else:
                connection.connect()
        except ssl.SSLCertVerificationError:
            raise
        except OSError as error:
            connection.close()
            raise Unconnected(str(error) or type(error).__name__) from error
        return connection

    def _taken(self) -> _Plain | _Secure | None:
        if os.getpid() != self._process:
            # The connections are those of the process that this one was forked from; it goes on with them.
            inherited, self._idle = self._idle, []
            # Not before: a thread that finds its own process here takes what is idle.
            self._process = os.getpid()
            for connection in inherited:
                connection.close()
        try:
            return self._idle.pop()
        except IndexError:
            return None


def in_thread(do: Callable[[], T]) -> Future[T]:
    """Do something that can't be interrupted in a thread of its own, so that nobody need wait for its end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(do())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def receive(answer: Answer, out: memoryview, seen: Callable[[memoryview], object]) -> None:
    """Fill ``out`` from an answer, handing each piece to ``seen`` while it is in cache.

    Raises
    ------
    ConnectionError
        If the answer ends before.
    """
    position = 0
    while position < len(out):
        piece = out[position : position + PIECE]
        count = answer.readinto(piece)
        if not count:
            raise ConnectionError(f"the connection ended after {position} of {len(out)} bytes")
        seen(piece[:count])
        position += count


class _Source(io.RawIOBase):
    """What a socket receives, until it ``is_ended``; from then on there is nothing to wait for."""

    is_ended = False

    def __init__(self, source: io.BufferedReader, sock: socket.socket, timing: Timing) -> None:
        # Keeps the socket open while the answer is read.
        self._source = source.detach()
        self._socket = sock
        self._timing = timing
        self._wait_s = sock.gettimeout()

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int | None:
        if self.is_ended:
            return None
        if (wait_s := self._timing.wait_s()) != self._wait_s:
            self._socket.settimeout(wait_s)
            self._wait_s = wait_s
        try:
            count = self._socket.recv_into(out)
        except TimeoutError:
            raise self._timing.late() from None
        self._timing.moved(count)
        return count

    def close(self) -> None:
        self._source.close()
        super().close()


class _Received(io.BufferedReader):
    """What came from a source, and at its end whether more came than was read."""

    raw: _Source
    has_surplus = False

    def close(self) -> None:
        if not self.closed:
            self.raw.is_ended = True
            self.has_surplus = bool(self.peek(1))
        super().close()


class _Response(HTTPResponse):
    """An answer whose end is where its header says, or which ends its connection."""

    def __init__(self, sock: socket.socket, *args: Any, timing: Timing, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = self._received = _Received(_Source(self.fp, sock, timing))

    @property
    def has_surplus(self) -> bool:
        """True if bytes came that are not of this answer."""
        return self._received.has_surplus

    def begin(self) -> None:
        super().begin()
        lengths = self.headers.get_all("Content-Length", [])
        encoded = "Transfer-Encoding" in self.headers
        if len(set(lengths)) > 1 or any(not (length.isascii() and length.isdecimal()) for length in lengths):
            raise http.client.HTTPException(f"the answer's length is {', '.join(lengths)[:100]}")
        if encoded and (lengths or not self.chunked):
            self.will_close = True
        if self.status in {204, 304} and (encoded or any(length != "0" for length in lengths)):
            # It has no body, and the server may think otherwise.
            self.will_close = True

    def _read_status(self) -> tuple[str, int, str]:
        """The status line of the answer itself; `http.client` passes over no announcement but 100."""
        for _ in range(_MAX_INTERIM):
            version, status, reason = super()._read_status()  # type: ignore[misc]
            if not 100 <= status < 200:
                return version, status, reason
            if status == http.client.SWITCHING_PROTOCOLS:
                raise http.client.HTTPException("the server speaks another protocol from here on, unasked")
            http.client.parse_headers(self.fp)
        raise http.client.HTTPException(f"no answer came after {_MAX_INTERIM} announcements of one")


class _Timed(http.client.HTTPConnection):
    _timing: Timing

    def exchange(
        self, method: str, target: str, headers: Mapping[str, str], body: Buffer | None, timing: Timing
    ) -> _Response:
        self._timing = timing
        self.response_class = partial(_Response, timing=timing)  # type: ignore[assignment]
        is_cut = False
        try:
            self.request(method, target, body, headers)
        except (BrokenPipeError, ConnectionResetError):
            # Whoever refuses a body need not take it; the refusal may be there to read.
            is_cut = True
        timing.sent()
        answer: _Response = self.getresponse()  # type: ignore[assignment]
        answer.will_close = answer.will_close or is_cut
        return answer

    def send(self, data: Any) -> None:
        octets = memoryview(data).cast("B")
        for start in range(0, len(octets), PIECE):
            piece = octets[start : start + PIECE]
            self.sock.settimeout(self._timing.wait_s())
            try:
                self.sock.sendall(piece)
            except TimeoutError:
                raise self._timing.late() from None
            self._timing.moved(len(piece))


class _Plain(_Timed):
    pass


class _Secure(_Timed, http.client.HTTPSConnection):
    pass


def _is_dropped(sock: socket.socket) -> bool:
    """True if the server has closed a connection that lay idle, or sent what nobody asked for."""
    if isinstance(sock, ssl.SSLSocket) and sock.pending():
        return True
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
