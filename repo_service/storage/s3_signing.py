"""Signature version 4 of a GET without a body, as S3 asks for it, in a tenth of the time that botocore takes."""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from concurrent.futures import Future
from typing import Any

from repo_service.connections import in_thread
from repo_service.storage.s3_answers import Transient

_ALGORITHM = "AWS4-HMAC-SHA256"
_NO_BODY = hashlib.sha256(b"").hexdigest()


class Signer:
    """Signs requests for one server; `tests/test_s3_signing.py` compares it with botocore.

    Parameters
    ----------
    host
        The server's name, with the port unless it is the scheme's own.
    region
        The region to sign for.
    credentials
        Botocore's, which renew themselves if they expire. That may take any time: it is done beside the requests, which
        wait for it as long as they have.
    """

    def __init__(self, host: str, region: str, credentials: Any) -> None:
        self._host = host
        self._region = region
        self._credentials = credentials
        self._lock = threading.Lock()
        self._renewal: Future[Any] | None = None
        self._kept: tuple[tuple[str, str], bytes] | None = None

    def headers(self, path: str, wait_s: float | None = None) -> dict[str, str]:
        """The headers of a GET of ``path``, which needs no quoting; others may be added unsigned.

        Raises
        ------
        Transient
            If there are no fresh credentials after ``wait_s``.
        """
        frozen = self._frozen(wait_s)
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        headers = {"Host": self._host, "X-Amz-Content-SHA256": _NO_BODY, "X-Amz-Date": stamp}
        if frozen.token:
            headers["X-Amz-Security-Token"] = frozen.token
        names = ";".join(headers).lower()
        named = "".join(f"{name.lower()}:{value}\n" for name, value in headers.items())
        request = f"GET\n{path}\n\n{named}\n{names}\n{_NO_BODY}"
        scope = f"{stamp[:8]}/{self._region}/s3/aws4_request"
        to_sign = f"{_ALGORITHM}\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        signature = hmac.digest(self._key(frozen.secret_key, stamp[:8]), to_sign.encode(), "sha256").hex()
        headers["Authorization"] = (
            f"{_ALGORITHM} Credential={frozen.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return headers

    def _frozen(self, wait_s: float | None) -> Any:
        is_old = getattr(self._credentials, "refresh_needed", None)
        if is_old is None or not is_old():
            return self._credentials.get_frozen_credentials()
        with self._lock:
            if self._renewal is None or self._renewal.done():
                self._renewal = in_thread(self._credentials.get_frozen_credentials)
            renewal = self._renewal
        try:
            return renewal.result(wait_s)
        except TimeoutError:
            raise Transient("the credentials were not renewed in time") from None
        except RuntimeError as error:
            raise Transient(f"the credentials could not be renewed: {error}") from error

    def _key(self, secret: str, day: str) -> bytes:
        """The key of a day, kept until the day or the credentials change."""
        kept = self._kept
        if kept is None or kept[0] != (secret, day):
            key = f"AWS4{secret}".encode()
            for part in (day, self._region, "s3", "aws4_request"):
                key = hmac.digest(key, part.encode(), "sha256")
            self._kept = kept = ((secret, day), key)
        return kept[1]
