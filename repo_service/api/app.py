"""The HTTP application: routes, errors and guards put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.types import ASGIApp

from repo_service.api import artifact_routes, chunk_routes, push_routes, service_routes, token_routes
from repo_service.api.access import OPEN_PATHS, Authentication, guarded_routes
from repo_service.api.context import NAMESPACE_PARAMETER, Context
from repo_service.api.errors import ErrorAnswer, error_answers, install_error_handlers
from repo_service.api.loopback import LoopbackOnly
from repo_service.api.observed import Observed
from repo_service.api.tracing import Traced
from repo_service.domain.errors import KvgraftError, MalformedRequest
from repo_service.services.repository import LocalRepository
from repo_service.settings import Settings
from repo_service.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

_DESCRIPTION = """A repository of byte-exact KV artifacts. Routes below `/v1` without a namespace are those of the
namespace `default`. Every error is `{"error": {"code", "message", "details"}}` with a stable code."""


class _Application(FastAPI):
    asks_for_tokens = False

    def openapi(self) -> dict[str, Any]:
        described = self.openapi_schema is not None
        schema = super().openapi()
        if not described:
            for path, operations in schema["paths"].items():
                for operation in operations.values() if "{namespace}" in path else ():
                    operation.setdefault("parameters", []).insert(0, NAMESPACE_PARAMETER)
            if self.asks_for_tokens:
                schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
                schema["security"] = [{"token": []}]
                for path in OPEN_PATHS:
                    schema["paths"][path]["get"]["security"] = []
        return schema

    def build_middleware_stack(self) -> ASGIApp:
        # Outside of everything, also of what answers an unexpected exception.
        stack = super().build_middleware_stack()
        if self.state.tracer_provider is not None:
            stack = Traced(stack, self.state.tracer_provider)
        return Observed(stack, self.state.context.metrics)


def create_app(
    repository: LocalRepository, settings: Settings, tracer_provider: TracerProvider | None = None
) -> FastAPI:
    """The application over an open repository, which stays the caller's to close.

    Parameters
    ----------
    tracer_provider
        OpenTelemetry's, if requests are to be traced.

    Raises
    ------
    TypeError
        If a route has no guard.
    """
    app = _Application(
        title="kvgraft",
        version=__version__,
        description=_DESCRIPTION,
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={
            **error_answers(MalformedRequest, KvgraftError),
            "default": {"model": ErrorAnswer, "description": "Any other error."},
        },
    )
    app.state.context = Context(repository, settings)
    app.state.tracer_provider = tracer_provider
    install_error_handlers(app)
    app.asks_for_tokens = settings.auth == "tokens"
    app.add_middleware(Authentication, recognition=repository.recognition if app.asks_for_tokens else None)
    if not app.asks_for_tokens and not settings.insecure_any_host:
        app.add_middleware(LoopbackOnly)
    own = list(app.routes)
    # Routes are tried in order: those that are asked most come first.
    for router in chunk_routes.router, push_routes.router, artifact_routes.router:
        app.include_router(router, prefix="/v1/namespaces/{namespace}")
        app.include_router(router, prefix="/v1")
    app.include_router(token_routes.router)
    app.include_router(service_routes.router)
    # All but the description of the API, which every token may read.
    list(guarded_routes(route for route in app.routes if route not in own))
    return app
