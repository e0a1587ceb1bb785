"""Refuses requests with an unknown host name, if no API key protects the server.

A web page can make the browser resolve a name of the page's own domain to 127.0.0.1 (DNS
rebinding). The browser then treats the frontend as a part of the page's origin, so that the page
can read the responses. The header Host of such a request contains the name from the page's URL. A
page cannot choose an IP address or a name under "localhost" for this purpose, because browsers do
not look these hosts up in the DNS. The public DNS has no names under "internal", which ICANN has
reserved for private networks. A container reaches its machine under host.docker.internal.
"""

import ipaddress
import re
import socket

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from nereid_client.error_responses import error_response
from nereid_client.errors import ApiError, shown
from nereid_client.settings import Settings
from nereid_client.workers.listening_sockets import is_loopback

# Matches the value of the header Host. The group is the host without the port, without the brackets
# of an IPv6 address and without a dot at the end. Examples: "[::1]:9000" gives "::1", and
# "localhost.:9000" gives "localhost".
_HOST = re.compile(r"\[?(.*?)\]?\.?(?::\d*)?")


class AllowedHosts:
    """Middleware that sends the status 403 if the header Host contains an unknown name.

    A request without the header Host is answered, because it cannot come from a browser: every
    browser sends this header.

    Args:
        app: the application that this middleware calls.
        names: the names that are allowed, in lower case. IP addresses, `localhost` and names that
            end in `.localhost` or `.internal` are always allowed.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, or refuse the request."""
        header = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if self._is_allowed(header):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            403,
            f"The host {shown(header)} in the header Host is not allowed. Without an API key, this "
            "server accepts only localhost, names that end in .localhost or .internal, IP "
            "addresses, the name of its machine, and the names in the setting allowed_hosts. Add "
            "the name to NEREID_ALLOWED_HOSTS, or set NEREID_API_KEY.",
            code="host_not_allowed",
        )
        await error_response(error, scope)(scope, receive, send)

    def _is_allowed(self, header: str) -> bool:
        """Return whether a request with this header Host may be answered."""
        match = _HOST.fullmatch(header.lower())
        host = match[1] if match else header
        is_local_name = host == "localhost" or host.endswith((".localhost", ".internal"))
        return not header or is_local_name or host in self._names or _is_ip_address(host)


def names_to_check(settings: Settings) -> frozenset[str] | None:
    """Return the names that the header Host may contain, or None if all names are allowed.

    All names are allowed if requests need an API key, because a web page does not know the key. If
    other machines can reach the frontend, their users choose its name. All names are then allowed
    unless the setting allowed_hosts contains names.
    """
    has_key = bool(settings.api_key or settings.api_key_file)
    names = [name.strip().lower() for name in settings.allowed_hosts.split(",")]
    allows_all = "*" in names if any(names) else not is_loopback(settings.host)
    if has_key or allows_all:
        return None
    return frozenset((*filter(None, names), settings.host.lower(), socket.gethostname().lower()))


def _is_ip_address(host: str) -> bool:
    """Return whether `host` is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
