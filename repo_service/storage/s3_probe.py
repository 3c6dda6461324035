"""Whether a server obeys headers that nobody signed, which would make a presigned PUT good for more than it says.

A header that names another object as the source of a copy would let whoever has the URL read what they have no right to (I7), one
that has an archive unpacked would let them write anywhere. AWS refuses such headers; not every server does.
"""

from __future__ import annotations

import io
import logging
import os
import tarfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress

from repo_service.domain.errors import RepositoryError, Unavailable
from repo_service.storage.store import Store

_log = logging.getLogger(__name__)

_warned: set[str] = set()

Put = Callable[[str, bytes, Mapping[str, str]], int]


def is_strict(store: Store, near: str, place_of: Callable[[str], str], put: Put) -> bool:
    """True if a presigned PUT does nothing but store its body; otherwise whoever runs the service is told.

    Parameters
    ----------
    store
        Where objects are written, and removed again.
    near
        Key that theirs begin with.
    place_of
        ``bucket/path`` of a key.
    put
        Sends body and headers to a presigned URL of a key, the headers unsigned; returns the status of the answer.

    Raises
    ------
    Unavailable
        If the server did not make it plain.
    """
    near = f"{near}-{uuid.uuid4().hex}"
    source, target, unpacked = f"{near}/source", f"{near}/target", f"{near}/unpacked"
    secret, other = os.urandom(1024), bytes(1024)
    archive = _archive(place_of(unpacked).partition("/")[2])
    unpack = {"x-amz-meta-snowball-auto-extract": "true", "x-amz-snowball-extract": "true"}
    try:
        store.put(source, secret)
        for body, headers in (
            (other, {"x-amz-copy-source": f"/{place_of(source)}"}),
            (other, {"x-amz-copy-source": place_of(source)}),
            (archive, unpack),
        ):
            status = put(target, body, headers)
            found = store.get(target)
            if found == secret or store.exists(unpacked) or (status == 200 and found != body):
                _warn(place_of(near).partition("/")[0], next(iter(headers)))
                return False
            if status != 200 and not 400 <= status < 500:
                raise _unclear(status)
        # It would refuse everything if, say, its clock were wrong, and tell nothing by it.
        status = put(target, other, {})
        if status != 200 or store.get(target) != other or store.get(source) != secret:
            raise _unclear(status)
        return True
    finally:
        # What stays lies among the uploads of the push, which its end removes.
        with suppress(RepositoryError):
            for key in list(store.list(near)):
                store.delete(key, durable=False)


def _warn(bucket: str, header: str) -> None:
    if bucket not in _warned:
        _warned.add(bucket)
        _log.warning(
            "clients get no URLs to put chunks at in s3://%s: the server obeys %s, which nobody signed, in a presigned PUT, so that "
            "one tenant could read or write what is another's. Pushes go through the service",
            bucket,
            header,
        )


def _archive(name: str) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    return held.getvalue()


def _unclear(status: int) -> Unavailable:
    return Unavailable(
        f"S3 answered a presigned PUT of the service's own with {status}, so that what it does with those of clients is unknown: "
        f"send chunks to the service",
        status=status,
    )
