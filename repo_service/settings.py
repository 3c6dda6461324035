"""Settings of the service: from ``KVGRAFT_…`` environment variables, or as arguments."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from repo_service.domain.errors import InvalidInput

Seconds = Annotated[float, Field(gt=0, le=86400)]


class Settings(BaseSettings):
    """Everything that configures the service. Use `load_settings` where errors reach a person."""

    model_config = SettingsConfigDict(env_prefix="KVGRAFT_", frozen=True, extra="forbid")

    repo: str = Field(
        "", description="URL of the repository to serve: file:///absolute/path, s3://bucket/prefix or memory:."
    )
    index: str = Field(
        "",
        description="URL of the index, sqlite:///absolute/path or postgresql://user:password@host/database; an S3 "
        "repository needs one, a directory has its own unless it is given one.",
    )
    auth: Literal["none", "tokens"] = Field(
        "none", description="Whom to serve: none asks nobody and is for loopback, tokens asks for a token."
    )
    host: str = Field("127.0.0.1", description="Address to listen on; with auth none it must be a loopback address.")
    port: int = Field(8750, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    insecure_any_host: bool = Field(
        False, description="Serve addresses other than loopback, and any Host header, although nobody is authenticated."
    )
    tls_cert: str = Field("", description="PEM file with the certificate to serve HTTPS with, and its chain.")
    tls_key: str = Field("", description="PEM file with the certificate's key.")
    forwarded_allow_ips: str = Field(
        "",
        description="Addresses or networks of proxies whose X-Forwarded-For is believed, with commas between them.",
    )
    chunk_transfers: int = Field(
        6, ge=1, le=1024, description="Chunks in transfer at once; each holds at most 8 MiB of memory."
    )
    document_transfers: int = Field(
        2, ge=1, le=64, description="Manifests and other documents over 256 KiB handled at once, 64 MiB each at most."
    )
    queue: int = Field(
        128, ge=0, le=65536, description="Transfers that may wait for a turn; further ones are answered 503."
    )
    queue_seconds: Seconds = Field(30, description="Longest wait for a turn before the answer is 503.")
    stall_seconds: Seconds = Field(25, description="A transfer that moves no byte for so long is cut.")
    body_seconds: Seconds = Field(600, description="Deadline for the whole body of a request, or of an answer.")
    idle_seconds: Seconds = Field(25, description="A connection must send its next whole request header within this.")
    connections: int = Field(512, ge=1, le=65536, description="Open connections; further ones are answered 503.")
    namespace_requests_per_second: float = Field(
        0, ge=0, le=10**9, description="Requests that a namespace may have in a second, at each replica; 0 is no limit."
    )
    namespace_mib_per_second: float = Field(
        0, ge=0, le=10**9, description="MiB of bodies that it may have in a second, both ways together; 0 is no limit."
    )
    direct_seconds: int = Field(
        0,
        ge=0,
        le=3600,
        description="How long the URLs are good at which clients fetch and put chunks at S3 themselves; with 0 there are none.",
    )
    gc_seconds: float = Field(
        600, ge=0, le=10**7, description="Time between collections of garbage; 0 leaves them to kvgraft gc."
    )
    gc_grace_seconds: float = Field(
        3600, ge=0, le=10**7, description="Objects that the index does not know are removed when they are older."
    )
    scrub_seconds: float = Field(
        7 * 86400, ge=0, le=10**7, description="Time between scrubs; 0 leaves them to kvgraft scrub."
    )
    scrub_mib_per_second: float = Field(64, gt=0, le=10**6, description="Most MiB that such a scrub reads in a second.")
    audit_log: str = Field(
        "",
        description="File that a line is added to for what callers do and for everything that is removed; without one, "
        "standard error.",
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="Lines of the log, on standard error: text, or json for one object each."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level that is logged: debug, info (a line for each request), warning or error."
    )
    shutdown_seconds: int = Field(30, ge=0, le=3600, description="Time for running requests to end after SIGTERM.")


def load_settings(**values: Any) -> Settings:
    """Read the settings; ``values`` go before the environment.

    Raises
    ------
    InvalidInput
        Names the settings that are not valid.
    """
    try:
        return Settings(**values)
    except ValidationError as error:
        problems = {".".join(map(str, e["loc"])): e["msg"] for e in error.errors()}
        listed = "; ".join(f"{name} (KVGRAFT_{name.upper()}): {message}" for name, message in problems.items())
        raise InvalidInput(f"the settings are not valid: {listed}", settings=problems) from None
