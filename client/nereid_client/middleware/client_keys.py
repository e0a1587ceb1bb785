"""API keys with weights and limits. The frontend reads the key file again after a change.

The file is TOML. Each table is one client:

    [team-a]
    key = "sk-..."                  # or key_sha256, the SHA-256 digest of the key in hexadecimal
    weight = 2.0                    # the weight of the client in the fair scheduling of requests
    requests_per_minute = 600       # 0, the default of each limit, means no limit
    tokens_per_minute = 100000
    max_concurrent_requests = 32
"""

import hashlib
import hmac
import logging
import math
import time
import tomllib
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from nereid_client.errors import ApiError
from nereid_client.middleware.usage import Usages
from nereid_client.settings import SettingsError, check_key, describe_requirement

_CHECK_EVERY_S = 1.0
_MAX_SHARE_LENGTH = 64
# Limits are converted to floats when waiting times are computed. A float can represent every
# integer up to 2**53, but only some larger integers.
_Limit = Annotated[int, Field(ge=0, le=2**53)]
_DIGEST_OF_EMPTY_KEY = hashlib.sha256(b"").hexdigest()

_log = logging.getLogger(__name__)


class KeyEntry(BaseModel):
    """One table in the key file: a client with an API key, a weight and limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: Annotated[str, BeforeValidator(check_key)] = Field(default="", repr=False)
    key_sha256: Annotated[str, Field(pattern="^([0-9a-fA-F]{64})?$")] = ""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    requests_per_minute: _Limit = 0
    tokens_per_minute: _Limit = 0
    max_concurrent_requests: _Limit = 0

    @model_validator(mode="after")
    def _check_key(self) -> "KeyEntry":
        if bool(self.key) == bool(self.key_sha256):
            raise ValueError("give exactly one of key and key_sha256")
        if self.key_sha256.lower() == _DIGEST_OF_EMPTY_KEY:
            # Otherwise, each request without a key would belong to this client.
            raise ValueError("key_sha256 is the digest of an empty key, so give that of a key")
        return self

    @property
    def digest(self) -> bytes:
        """The SHA-256 digest of the key."""
        return bytes.fromhex(self.key_sha256) if self.key_sha256 else _digest(self.key.encode())


class Bucket:
    """A limit on an amount per minute, implemented as a token bucket.

    Args:
        per_minute: the amount that can be used at once, and the amount that becomes available again
            in each minute. 0 means no limit.
        usages: stores the used amount.
        key: the key of the used amount in `usages`.
    """

    def __init__(self, per_minute: int, usages: Usages | None = None, key: str = "") -> None:
        self.per_minute = per_minute
        self._usages = usages or Usages()
        self._key = key

    def take(self, amount: int, now: float) -> None:
        """Add `amount` to the used amount, even if the sum exceeds the limit."""
        if self.per_minute:
            self._usages.add(self._key, amount, self.per_minute, now)

    def wait_s(self, now: float, amount: float = 1.0) -> float:
        """Return the number of seconds until `amount` is available.

        Return 0 if the amount is available now, or if there is no limit.
        """
        if not self.per_minute:
            return 0.0
        used = self._usages.used(self._key, self.per_minute, now)
        return max(0.0, (used + amount - self.per_minute) * 60 / self.per_minute)

    def change_limit(self, per_minute: int, now: float) -> None:
        """Replace the limit. The used amount does not change."""
        if per_minute != self.per_minute:
            self.take(0, now)  # from now on, the used amount decreases with the new rate
            self.per_minute = per_minute


_NO_LIMITS = KeyEntry(key="unused")
"""The table of a client without limits. The key is required, but no client can use this key."""


class Client:
    """A client of the API, with its limits and its counters of requests and tokens.

    Attributes:
        name: the name of the client in the key file. "" if there is no key file, or if the client
            uses the key in the setting api_key.
        priority: the priority of the client's requests to the language model. None if each request
            can set its own priority.
        share: the name of the client in the fair scheduling of requests, which lets clients with
            different shares start requests in turn.
        weight: the weight of the client in the fair scheduling of requests.
        max_concurrent: the largest number of the client's requests that run at the same time. 0
            means no limit.
    """

    def __init__(
        self,
        name: str = "",
        entry: KeyEntry = _NO_LIMITS,
        share: str = "",
        priority: int | None = None,
        usages: Usages | None = None,
    ) -> None:
        """Create a client.

        Args:
            name: the name of the client in the key file, or "" if the file has no such client.
            entry: the client's table in the key file. The default sets no limits.
            share: the name of the client in the fair scheduling of requests, which lets clients
                with different shares start requests in turn. "" uses the value of `name`. A share
                can come from a request header, so at most 64 characters of it are used.
            priority: the priority of all requests of the client to the language model. None lets
                each request set its own priority.
            usages: stores how many requests and tokens each client has used in the last minute.
                None creates a new store for each limit.
        """
        self.name = name
        self.priority = priority
        self.share = (share or name)[:_MAX_SHARE_LENGTH]
        self.weight = entry.weight
        self.max_concurrent = entry.max_concurrent_requests
        self._requests = Bucket(entry.requests_per_minute, usages, f"requests of {name}")
        self._tokens = Bucket(entry.tokens_per_minute, usages, f"tokens of {name}")

    def update(self, entry: KeyEntry, now: float) -> None:
        """Replace the limits of the client.

        The requests and tokens of the last minute still count towards the new limits.

        Args:
            entry: the client's table in the key file.
            now: the current time of time.monotonic().
        """
        self.weight = entry.weight
        self.max_concurrent = entry.max_concurrent_requests
        self._requests.change_limit(entry.requests_per_minute, now)
        self._tokens.change_limit(entry.tokens_per_minute, now)

    def rejection(self, now: float) -> ApiError | None:
        """Return an error if the limits forbid a new request, or None if the request may run."""
        wait_s = self._requests.wait_s(now)
        if wait_s > 0:
            return limit_error(
                "This API key has sent more requests than its limit of "
                f"{self._requests.per_minute} per minute (requests_per_minute of the key)",
                wait_s,
            )
        wait_s = self._tokens.wait_s(now)
        if wait_s > 0:
            return limit_error(
                f"This API key has used more tokens than its limit of {self._tokens.per_minute} "
                "per minute (tokens_per_minute of the key)",
                wait_s,
            )
        return None

    def count_request(self, now: float) -> None:
        """Count a request that was admitted."""
        self._requests.take(1, now)

    def count_tokens(self, num_tokens: int) -> None:
        """Count the tokens of a request after the request has ended."""
        self._tokens.take(num_tokens, time.monotonic())


ANONYMOUS = Client()
"""The client of every request if there is no key file."""

current_client: ContextVar[Client] = ContextVar("current_client", default=ANONYMOUS)
"""The client of the request that the current task handles.

The backend and the response store read this variable, so the routes need not pass the client on.
"""


class KeyFile:
    """The API clients that a key file describes.

    The object checks once a second whether the file has changed, and reads a changed file again. If
    the changed file is damaged, the clients of the previous version stay valid, and the log
    contains the reason.
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        usages: Usages | None = None,
    ) -> None:
        """Read the key file.

        Args:
            path: the file.
            clock: returns a time in seconds that never goes back.
            usages: stores how many requests and tokens each client has used.

        Raises: SettingsError if the file cannot be read.
        """
        self._path = path
        self._clock = clock
        self._usages = usages

        # `_version` identifies the content of the key file that was read last. After the time
        # `_check_due`, `_version` is compared with the current version of the file.
        self._version = self._current_version()
        self._check_due = clock() + _CHECK_EVERY_S

        # The content of the file.
        self._clients: dict[str, Client] = {}  # maps names to clients
        # Pairs of the digest of an API key and the client that has this key.
        self._digests: list[tuple[bytes, Client]] = []
        self._load()

    def find(self, key: str) -> Client | None:
        """Return the client that has an API key, or None if no client has this key.

        The digest of `key` is compared with the digest of every client, so that the duration of the
        search does not depend on `key`.

        Args:
            key: the API key in a header. Each character represents one byte of the header.
        """
        self._reload_if_changed()
        given = _digest(key.encode("latin-1"))
        found = None
        for digest, client in self._digests:
            if hmac.compare_digest(given, digest):
                found = client
        return found

    def has(self, name: str) -> bool:
        """Return whether the key file has an entry for the client `name`."""
        self._reload_if_changed()
        return name in self._clients

    def _reload_if_changed(self) -> None:
        """Read the key file again if the file has changed.

        If the new file is not valid, log an error and continue with the previous API keys.
        """
        now = self._clock()
        if now < self._check_due:
            return
        self._check_due = now + _CHECK_EVERY_S
        version = self._current_version()
        if version == self._version:
            return
        self._version = version
        try:
            self._load()
        except SettingsError as error:
            _log.error("%s The frontend continues with the previous API keys.", error)
        else:
            count = len(self._clients)
            _log.warning("The frontend has read %d API keys from %s", count, self._path)

    def _load(self) -> None:
        """Read the key file. If a client was in the file before, keep its `Client` object."""
        entries = read_key_file(self._path)
        self._clients = {
            name: self._clients.get(name) or Client(name, usages=self._usages) for name in entries
        }
        for name, entry in entries.items():
            self._clients[name].update(entry, self._clock())
        self._digests = [(entry.digest, self._clients[name]) for name, entry in entries.items()]

    def _current_version(self) -> tuple[int, int] | None:
        """Return the file's modification time and inode number, or None if the file cannot be read.

        If one of these numbers has changed, the file has changed.
        """
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino


def read_key_file(path: Path) -> dict[str, KeyEntry]:
    """Read the key file. Return a dict that maps the name of each client to the client's table.

    Raises: SettingsError that names the file, the table and the reason.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"api_key_file: the file {path} cannot be read ({error}).") from None
    if not tables:
        raise SettingsError(f"api_key_file: the file {path} contains no API key.")
    entries = {name: _read_entry(name, table, path) for name, table in tables.items()}
    digests = {entry.digest for entry in entries.values()}
    if len(digests) < len(entries):
        raise SettingsError(f"api_key_file: the file {path} contains the same key twice.")
    return entries


def _read_entry(name: str, table: object, path: Path) -> KeyEntry:
    """Return the validated table of one client."""
    # An empty name is refused, because a client without a name can do everything that the key in
    # the setting api_key allows. A name with more than `_MAX_SHARE_LENGTH` characters is refused,
    # because the fair scheduling of requests reads only the first `_MAX_SHARE_LENGTH` characters.
    # Two clients whose names differ only after these characters would count as one client.
    if not 1 <= len(name) <= _MAX_SHARE_LENGTH:
        raise SettingsError(
            f"api_key_file: the name of a client must have 1 to {_MAX_SHARE_LENGTH} characters, "
            f"but a table in the file {path} has the name {name[:80]!r}."
        )
    try:
        return KeyEntry.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, (name, *first["loc"])))
        raise SettingsError(
            f"api_key_file: {place} in the file {path} is wrong: {describe_requirement(first)}."
        ) from None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def limit_error(problem: str, wait_s: float) -> ApiError:
    """Return an error with the status 429 for a request that exceeds a limit of its API key."""
    seconds = max(1, math.ceil(wait_s))
    return ApiError(
        429,
        f"{problem}. Try again in {seconds} s.",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(seconds)},
        limit="api_key_file",
    )
