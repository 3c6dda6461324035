"""Who asks, and what they may do: tokens are recognised before any route, and each route declares what it needs.

Authentication is an ASGI middleware, authorisation the class that every route has. Both are decided
by the request and its token alone, before a body is read or anything is looked up (I7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from repo_service.api.audit import recorded
from repo_service.api.errors import STATUS, error_answer
from repo_service.api.rates import Rates
from repo_service.domain.access import ANYONE, Access, Scope
from repo_service.domain.errors import KvgraftError
from repo_service.domain.names import DEFAULT_NAMESPACE
from repo_service.services.access import Recognition, unauthenticated

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
"""What is answered without a token."""

_ACCESS = "kvgraft.access"
_NEED = "__kvgraft_need__"

# Threads that may look tokens up: a flood of unknown ones takes no more.
_LOOKUPS = 4

F = TypeVar("F", bound=Callable[..., Any])


class Over(Enum):
    """Where a right must hold."""

    NAMESPACE = "the namespace in the path"
    ANY = "any namespace"
    ALL = "every namespace"


@dataclass(frozen=True)
class Need:
    """What a route asks of its caller; without a scope, nothing at all."""

    scope: Scope | None
    over: Over
    act: str | None


def needs(scope: Scope, over: Over = Over.NAMESPACE, *, act: str | None = None) -> Callable[[F], F]:
    """Declare what a route's function needs. It stands below the route's own decorators.

    Parameters
    ----------
    scope, over
        The right, and where it must hold.
    act
        What the audit log calls it, if it is written down.
    """
    return _declare(Need(scope, over, act))


def needs_nothing(function: F) -> F:
    """Declare that a route is answered to everyone."""
    return _declare(Need(None, Over.ANY, None))(function)


def _declare(need: Need) -> Callable[[F], F]:
    def declare(function: F) -> F:
        setattr(function, _NEED, need)
        return function

    return declare


class GuardedRoute(APIRoute):
    """A route that is answered to those only who may have the answer.

    Raises
    ------
    TypeError
        If its function declares no need.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        need = getattr(endpoint, _NEED, None)
        if need is None:
            raise TypeError(f"{endpoint.__name__} ({path}) does not declare what it needs: see needs()")
        self.need: Need = need
        super().__init__(path, endpoint, **options)

    async def handle(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()) or self.need.scope is None:
            # The base class refuses other methods.
            await super().handle(scope, receive, send)
            return
        access: Access = scope[_ACCESS]
        namespace = namespace_in(scope) if self.need.over is Over.NAMESPACE else None
        with ExitStack() as stack:
            if self.need.act is not None:
                send = stack.enter_context(recorded(scope, self.need.act, access.token_id, namespace, send))
            if namespace is not None:
                access.require_namespace(namespace)
            elif self.need.over is Over.ALL:
                access.require_everywhere()
            access.require_scope(self.need.scope)
            rates: Rates = scope["app"].state.context.rates
            if namespace is not None and rates.limited:
                receive, send = rates.admit(namespace, receive, send)
            await super().handle(scope, receive, send)


def guarded_routes(routes: Iterable[BaseRoute]) -> Iterator[GuardedRoute]:
    """Every route below, those of included routers too.

    Raises
    ------
    TypeError
        If one has another class, and so no guard.
    """
    for route in routes:
        if isinstance(route, GuardedRoute):
            yield route
        elif (included := getattr(route, "original_router", None)) is not None:
            yield from guarded_routes(included.routes)
        else:
            raise TypeError(f"the route {getattr(route, 'path', route)} is not a GuardedRoute")


class Authentication:
    """ASGI middleware that tells who asks, and refuses everyone else; buffers nothing.

    Parameters
    ----------
    recognition
        Knows the tokens; None where nobody is asked for one.
    """

    def __init__(self, app: ASGIApp, recognition: Recognition | None) -> None:
        self._app = app
        self._recognition = recognition
        self._lookups = CapacityLimiter(_LOOKUPS)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope[_ACCESS] = await self._access(scope)
            except KvgraftError as error:
                await error_answer(error, STATUS[error.code])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _access(self, scope: AsgiScope) -> Access | None:
        if self._recognition is None:
            return ANYONE
        if scope["path"] in OPEN_PATHS:
            return None
        token = _bearer(Headers(scope=scope))
        access = self._recognition.remembered(token)
        if access is None:
            access = await to_thread.run_sync(self._recognition.recognise, token, limiter=self._lookups)
        return access


def access_of(request: Request) -> Access:
    """What the caller may do."""
    access: Access = request.scope[_ACCESS]
    return access


def namespace_in(scope: AsgiScope) -> str:
    """The namespace in the path, or the default one; the repository checks its grammar."""
    return str(scope["path_params"].get("namespace", DEFAULT_NAMESPACE))


def _bearer(headers: Headers) -> str:
    """The bearer token of a request; raises `Unauthenticated` if there is not exactly one."""
    given = headers.getlist("authorization")
    scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    if scheme.lower() != "bearer":
        raise unauthenticated()
    return token.strip()
