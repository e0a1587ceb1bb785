"""The TCP sockets on which the frontend waits for connections."""

import ipaddress
import socket

# The number of connections that the event loop accepts in one iteration.
_NUM_DUPLICATES = 16


def bound_socket(host: str, port: int, *, is_shared: bool = True) -> socket.socket:
    """Return a TCP socket that is bound to an address but does not yet listen.

    Args:
        host: the address.
        port: the port. 0 selects a free port.
        is_shared: whether other sockets of this user may be bound to the same address. If several
            sockets listen at this address, the kernel gives each new connection to one socket.

    Raises: OSError if the address is in use.
    """
    family, kind, protocol, _, address = _addresses(host, port)[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        # Without this option, the socket would also listen on the IPv4 port. The IPv4 port can have
        # a separate socket.
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    if is_shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def listening_sockets(host: str, port: int) -> list[socket.socket]:
    """For a frontend with one process, return sockets for all addresses of a host name.

    Raises: OSError if an address is in use.
    """
    hosts = dict.fromkeys(address[0] for *_, address in _addresses(host, port))
    return [
        duplicate
        for one in hosts
        for duplicate in with_duplicates(bound_socket(str(one), port, is_shared=False))
    ]


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`.

    Examples: the result is True for "127.0.0.1", "::1" and "localhost", and False for "0.0.0.0" and
    for a name that has no address.
    """
    try:
        addresses = [str(address[0]) for *_, address in _addresses(host, 0)]
    except (OSError, UnicodeError):  # UnicodeError: a part of the name has over 63 characters
        return False
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def with_duplicates(bound: socket.socket) -> list[socket.socket]:
    """Return a socket and its duplicates, which accept connections from the same queue.

    In each iteration, the event loop uvloop accepts one connection for each listening socket. With
    a single socket, a connection that arrives after 500 others would wait for 500 iterations, which
    took 1.5 s in a test.
    """
    return [bound, *(bound.dup() for _ in range(_NUM_DUPLICATES - 1))]


def _addresses(host: str, port: int) -> list[tuple[int, int, int, str, tuple[str | int, ...]]]:
    """Return the addresses of a host name, in the format of socket.getaddrinfo."""
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)  # type: ignore[return-value]
