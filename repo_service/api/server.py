"""Running the service: one process, one repository, loopback unless told otherwise."""

from __future__ import annotations

import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import uvicorn

from repo_service.api.app import create_app
from repo_service.api.connection import connection_class
from repo_service.api.context import Context
from repo_service.api.jobs import audited, running
from repo_service.api.logs import logged
from repo_service.api.loopback import check_host, is_loopback
from repo_service.api.tls import InPieces, TlsServer, tls_options
from repo_service.api.tracing import exporting
from repo_service.domain.errors import InvalidInput, PortInUse
from repo_service.services.opening import open_local
from repo_service.services.places import MEMORY_URL
from repo_service.services.repository import LocalRepository
from repo_service.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


def _announce(url: str, guard: str) -> None:
    print(f"serving at {url} ({guard})")


def serve(settings: Settings, announce: Callable[[str, str], None] = _announce) -> None:
    """Serve ``settings.repo`` until SIGTERM or SIGINT; running requests are finished first.

    Parameters
    ----------
    settings
        What to serve, where, and within which limits.
    announce
        Called once with the service's URL and what guards it, when connections are accepted.

    Raises
    ------
    InvalidInput
        If the host is not loopback, or can't be listened on.
    PortInUse, MalformedUrl, NotARepository, NewerFormat, Conflict
    """
    check_host(settings)
    tls_options(settings)
    if not settings.repo:
        raise InvalidInput(
            "no repository to serve: give its URL (KVGRAFT_REPO), as file:///absolute/path or s3://bucket/prefix"
        )
    if settings.auth == "tokens" and settings.repo == MEMORY_URL:
        raise InvalidInput("a repository in memory has no tokens to ask for, and none can be made: serve a directory")
    with (
        ExitStack() as stack,
        logged(settings),
        exporting() as tracer_provider,
        audited(settings),
        listen(settings) as listener,
        open_local(settings.repo, index_url=settings.index or None) as repository,
        running(repository, settings),
    ):
        server = make_server(repository, settings, tracer_provider)
        stack.enter_context(_ended_by_signal(server))
        announce(address(listener, "https" if settings.tls_cert else "http"), _guard(settings, repository))
        server.run(sockets=[listener])


def _guard(settings: Settings, repository: LocalRepository) -> str:
    if settings.auth == "tokens":
        exposed = not settings.tls_cert and not is_loopback(settings.host)
        return (
            "every request needs a token"
            + ("" if repository.access_tokens() else "; there is none yet: kvgraft token create makes one")
            + ("; NOT ENCRYPTED: have a proxy do that" if exposed else "")
        )
    if settings.insecure_any_host:
        return "ANYONE who reaches it may read, push and delete: no tokens are asked for"
    return "loopback only: no tokens are asked for"


def listen(settings: Settings) -> socket.socket:
    """Bind the address of ``settings``; port 0 takes a free one.

    Raises
    ------
    PortInUse, InvalidInput
    """
    host, port = settings.host, settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=settings.connections)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} of {host} is in use: stop what listens there, or choose another port (0 takes a free one)",
                host=host,
                port=port,
            ) from None
        raise InvalidInput(f"can't listen on {host} port {port}: {error.strerror}", host=host, port=port) from None


def address(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def make_server(
    repository: LocalRepository, settings: Settings, tracer_provider: TracerProvider | None = None
) -> uvicorn.Server:
    """A server for an open repository; run it with ``run(sockets=[listen(settings)])``.

    Raises
    ------
    InvalidInput
        If the certificate can't be used.
    """
    tls = tls_options(settings)
    app = create_app(repository, settings, tracer_provider)
    context: Context = app.state.context
    config = uvicorn.Config(
        InPieces(app) if tls else app,
        http=connection_class(settings, context.metrics.refused),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=bool(settings.forwarded_allow_ips),
        forwarded_allow_ips=settings.forwarded_allow_ips,
        server_header=False,
        timeout_keep_alive=int(settings.idle_seconds) + 1,
        timeout_graceful_shutdown=settings.shutdown_seconds,
        **tls,
    )
    server = TlsServer(config, settings.idle_seconds) if tls else uvicorn.Server(config)
    context.is_ending = lambda: server.should_exit
    context.present.connections = lambda: len(server.server_state.connections)
    return server


@contextmanager
def _ended_by_signal(server: uvicorn.Server) -> Iterator[None]:
    """Let the server return after a signal, which it would raise again once it has shut down.

    One that comes before the server listens for signals itself ends it as soon as it runs.
    """

    def end(*_: object) -> None:
        server.should_exit = True

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
