"""What S3 answers, or fails to answer: what may pass, and what to tell whoever waits."""

from __future__ import annotations

import random
import ssl
from collections.abc import Mapping
from http.client import HTTPException

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSLError,
)
from botocore.parsers import ResponseParserError

from repo_service.domain.errors import KvgraftError, StorageFull, Unavailable

_PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
_PASSING_CODES = {"RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "SlowDown"}
_FULL_CODES = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "ServiceQuotaExceeded"}
_EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_ELSEWHERE_CODES = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "Redirect",
    "TemporaryRedirect",
}
_SETUP = (NoCredentialsError, PartialCredentialsError, ProfileNotFound, SSLError, ssl.SSLCertVerificationError)


# Between tries, at random up to twice as long each time.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


class Transient(Exception):
    """Something that may be otherwise at the next try."""


class Missing(Transient):
    """No such object; the bucket is there."""


class Refused(Exception):
    """An answer of S3 that says no.

    Parameters
    ----------
    status
        Of HTTP; codes of errors are not the same with all servers.
    code, message
        As the answer gives them.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"S3 answered {status} {code}: {message[:300]}")
        self.status = status
        self.code = code

    @property
    def is_missing(self) -> bool:
        """True if S3 says that the object is not there, though the bucket is."""
        return self.status == 404 and self.code == "NoSuchKey"

    @property
    def is_elsewhere(self) -> bool:
        """True if botocore would send the request elsewhere, or sign it for another region."""
        return self.code in _ELSEWHERE_CODES

    @property
    def is_expired(self) -> bool:
        """True if it is the credentials' time that is over."""
        return self.code in _EXPIRED_CODES

    @property
    def may_pass(self) -> bool:
        if self.status == 404:
            # Any other 404 may be that of something before S3 which has lost it for a while.
            return self.code not in {"NoSuchKey", "NoSuchBucket"}
        return (self.status in _PASSING or self.code in _PASSING_CODES) and self.code not in _FULL_CODES


def check_media_type(headers: Mapping[str, str]) -> None:
    """Refuse a page, which something before S3 gives in its place.

    Raises
    ------
    Transient
    """
    if headers.get("content-type", "").lower().startswith("text/html"):
        raise Transient("the answer is a page of HTML, which is not what S3 gives")


def refusal(error: ClientError) -> Refused:
    answer = error.response
    said = answer.get("Error", {})
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return Refused(int(status), str(said.get("Code", "")), str(said.get("Message", "")))


def transient(error: Exception, what: str) -> str:
    """What went wrong, in words, if another try may help; any other error is raised again.

    Raises
    ------
    Unavailable
        If the setup is at fault.
    """
    if isinstance(error, _SETUP):
        raise Unavailable(
            f"could not {what}: {error}. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, and "
            f"AWS_ENDPOINT_URL unless it is AWS; AWS_CA_BUNDLE names certificates to trust"
        ) from error
    if isinstance(error, (Transient, BotoCoreError, aiohttp.ClientError, HTTPException, OSError, ResponseParserError)):
        return f"{type(error).__name__}: {str(error) or 'nothing came for too long'}"[:300]
    raise error


def advice(refused: Refused, what: str, bucket: str) -> KvgraftError:
    """The error for an answer that will not change by itself."""
    said = f"could not {what}: {refused}".rstrip(".")
    if refused.status == 507 or refused.code in _FULL_CODES:
        return StorageFull(f"{said}. Free some space or raise the quota of the bucket {bucket}", bucket=bucket)
    if refused.code == "NoSuchBucket":
        hint = f"Make the bucket {bucket} first, or mend the URL or AWS_ENDPOINT_URL"
    elif refused.is_expired:
        hint = "Renew the credentials: fresh ones were looked for, and they have expired too"
    elif refused.status in {401, 403}:
        hint = (
            f"Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the clock, and that they may get, put, delete and list "
            f"objects of the bucket {bucket}"
        )
    elif refused.status in {301, 307, 400}:
        hint = "Check AWS_DEFAULT_REGION and AWS_ENDPOINT_URL: the bucket may be elsewhere"
    elif refused.status in {405, 501}:
        hint = "This server lacks what a repository needs: conditional PUT (If-None-Match) among others"
    else:
        hint = "Check AWS_ENDPOINT_URL and the server"
    return Unavailable(f"{said}. {hint}", bucket=bucket)


class Tries:
    """The tries of one operation: what may pass is waited for, what may not ends it.

    Parameters
    ----------
    what
        The operation, as in "could not …".
    bucket
        The bucket's name.
    seconds
        The operation's deadline, for the error that says it is over.
    """

    def __init__(self, what: str, bucket: str, seconds: float) -> None:
        self._what, self._bucket, self._seconds = what, bucket, seconds
        self._longest = _FIRST_PAUSE
        self._last = "S3 did not answer"
        self._has_expired = False

    def after(self, error: Exception) -> float:
        """Seconds until the next try after one that ended with ``error``.

        Raises
        ------
        Unavailable, StorageFull
            If another try would not help. What is no failure of S3 is raised as it is.
        """
        if isinstance(error, Refused):
            if not error.may_pass and (self._has_expired or not error.is_expired):
                raise advice(error, self._what, self._bucket) from error
            self._has_expired = self._has_expired or error.is_expired
            self._last = str(error)
        else:
            self._last = transient(error, self._what)
        pause = random.uniform(0, self._longest)
        self._longest = min(2 * self._longest, _LONGEST_PAUSE)
        return pause

    def over(self) -> Unavailable:
        """The error for an operation whose time is over."""
        return Unavailable(
            f"could not {self._what} within {self._seconds:g} s (at last: {self._last}): see that S3 answers, and try "
            f"again. What was to be changed may be changed all the same",
            bucket=self._bucket,
        )
