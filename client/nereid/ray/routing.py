"""Selects the server that has already received the longest prefix of a request's prompt.

The prefix cache of this server probably contains the prefix.
"""

import hashlib
import json
import random
from collections import Counter, OrderedDict
from collections.abc import Sequence

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

# The fields of a request that become part of the prompt, in the order of the prompt.
_PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "prompt", "input")
_CHARACTERS_PER_HASH = 256
_MAX_HASHES = 64
_MAX_PREFIXES = 100_000
_MAX_EXTRA_REQUESTS = 8


def prefix_hashes(body: bytes) -> tuple[bytes, ...]:
    """Return hashes of the prompt's first 256 characters, of its first 512 characters, and so on.

    If two prompts begin with the same 256 * n characters, their first n hashes are equal. The
    result contains at most 64 hashes. For a shorter prompt, the last hash is that of the whole
    prompt. If the body contains no prompt, the result is empty.
    """
    text = _prompt_text(body)[: _CHARACTERS_PER_HASH * _MAX_HASHES]
    hash_so_far = hashlib.blake2b(digest_size=8)
    hashes = []
    for start in range(0, len(text), _CHARACTERS_PER_HASH):
        part = text[start : start + _CHARACTERS_PER_HASH]
        hash_so_far.update(part.encode("utf-8", "surrogatepass"))
        hashes.append(hash_so_far.digest())
    return tuple(hashes)


def _prompt_text(body: bytes) -> str:
    """Return the JSON text of the prompt's fields. Omit the brackets at the end of the text.

    The text of a conversation's next turn then begins with the text of this turn. If the body
    contains no prompt, return "".

    Example: b'{"messages": [{"content": "a"}]}' returns '[[{"content": "a'. The text of the next
    turn is '[[{"content": "a"}, {"content": "b'.
    """
    try:
        fields = json.loads(body)
        parts = [fields[name] for name in _PROMPT_FIELDS if name in fields]
    except (ValueError, TypeError, RecursionError):
        return ""
    if not parts:
        return ""
    return json.dumps(parts, ensure_ascii=False).rstrip(']}"')


class PrefixRouter(RequestRouter):
    """Selects the server that has already received the longest prefix of a request's prompt.

    The server with the fewest requests is selected in two cases: no server has received the first
    characters of the prompt, or the server with the longest prefix has many more requests than
    another server. A router counts only the requests that it has sent itself.
    """

    def initialize_state(self, max_extra_requests: int = _MAX_EXTRA_REQUESTS) -> None:
        """Set the options.

        Args:
            max_extra_requests: the server with the longest prefix is selected only if it has at
                most this number of requests more than the server with the fewest requests.
        """
        self._max_extra_requests = max_extra_requests
        self._last_server: OrderedDict[bytes, ReplicaID] = OrderedDict()
        self._num_requests: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return two lists: one with only the best server, and one with all servers.

        If the best server accepts no requests, Ray tries the servers of the second list.
        """
        if pending_request is None:
            return [candidate_replicas]
        # If all servers are full, Ray calls this method again for the same request.
        # `should_backoff` makes Ray wait before each repeated call.
        pending_request.routing_context.should_backoff = True
        best = self._best_server(_hashes_of(pending_request), candidate_replicas)
        return [[best], candidate_replicas]

    def _best_server(
        self, hashes: Sequence[bytes], servers: Sequence[RunningReplica]
    ) -> RunningReplica:
        """Return the server that has received the longest prefix of a prompt, unless it is busy.

        The server is busy if it runs more than `_max_extra_requests` requests more than the server
        with the fewest requests. If the server is busy, or if no server has received a prefix,
        return a random one of the servers with the fewest requests.
        """
        fewest = min(self._num_requests[server.replica_id] for server in servers)
        with_prefix = self._server_with_prefix(hashes, servers)
        if with_prefix is not None:
            num_extra = self._num_requests[with_prefix.replica_id] - fewest
            is_busy = num_extra > self._max_extra_requests
            if not is_busy:
                return with_prefix
        least_used = [
            server for server in servers if self._num_requests[server.replica_id] == fewest
        ]
        return random.choice(least_used)

    def _server_with_prefix(
        self, hashes: Sequence[bytes], servers: Sequence[RunningReplica]
    ) -> RunningReplica | None:
        """Return the server that has received the longest prefix of the new prompt.

        If several servers have received this prefix, return the server that received it last. If no
        server has received any of the prefixes, return None.
        """
        by_id = {server.replica_id: server for server in servers}
        ids = (self._last_server.get(one) for one in reversed(hashes))
        return next((by_id[one] for one in ids if one in by_id), None)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Add one to the number of the server's running requests."""
        super().on_send_request(replica_id)
        self._num_requests[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Subtract one from the number of the server's running requests."""
        super().on_request_completed(replica_id, internal_request_id)
        self._num_requests[replica_id] -= 1
        if self._num_requests[replica_id] <= 0:  # Ray also reports requests that were not sent
            del self._num_requests[replica_id]

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ReplicaID,
        result: object,  # noqa: ARG002 - the signature is Ray's
    ) -> None:
        """For each prefix of a request's prompt, store the replica that received the request.

        If there are more than `_MAX_PREFIXES` prefixes, the prefixes are forgotten that no request
        has had for the longest time.
        """
        for prefix_hash in _hashes_of(pending_request):
            self._last_server[prefix_hash] = replica_id
            self._last_server.move_to_end(prefix_hash)
        while len(self._last_server) > _MAX_PREFIXES:
            self._last_server.popitem(last=False)  # the prefix that was not used for longest


def _hashes_of(pending_request: PendingRequest) -> tuple[bytes, ...]:
    """Return the prefix hashes that the arguments of `Server.forward` contain."""
    (request,) = pending_request.args
    return request.prefix_hashes  # type: ignore[no-any-return]
