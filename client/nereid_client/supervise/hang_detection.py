"""Finds a server that lives and does nothing any more.

Suspicious is one where requests are in work and none of Nereid's numbers on the metrics page has
moved for a while, or that page does not come. A slow reader can look like that too, so a small
request decides: any answer to it, a refusal too, and the server is well.
"""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request

from nereid_client.supervise.unfinished_requests import count_in_work, metrics_page
from nereid_client.supervise.warmup import Frontend

_LOOKS = 20
_SHORTEST_LOOK_S = 0.2
_LONGEST_LOOK_S = 5.0
_PROBE = {"text_input": "a", "max_tokens": 1}
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class HangWatch(threading.Thread):
    """Watches one server until it is told to stop.

    Args:
        frontend: knows of the requests that came by the OpenAI API.
        metrics_url: the server's page of metrics; without one nothing is ever suspicious.
        generate_url: where the small request goes.
        limit_s: half of it in silence, and half of it for the small request.

    Attributes:
        finding: what was found, None while all is well.
    """

    def __init__(
        self, frontend: Frontend, metrics_url: str, generate_url: str, limit_s: float
    ) -> None:
        super().__init__(daemon=True)
        self.finding: str | None = None
        self._frontend = frontend
        self._metrics_url = metrics_url
        self._generate_url = generate_url
        self._limit_s = limit_s
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def run(self) -> None:
        """Look, until something is found."""
        look_s = min(max(self._limit_s / _LOOKS, _SHORTEST_LOOK_S), _LONGEST_LOOK_S)
        last: str | None = None
        quiet_since = time.monotonic()
        while not self._stopped.wait(look_s):
            page = metrics_page(self._metrics_url)
            numbers = _numbers(page)
            is_moving = numbers is None or numbers != last
            last = numbers
            if is_moving or not count_in_work(self._frontend, page):
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since >= self._limit_s / 2:
                if not self._answers():
                    self.finding = (
                        f"tritonserver hangs: requests are in work, nothing moved for "
                        f"{self._limit_s / 2:g} s, and a small request had no answer for as long"
                    )
                    return
                quiet_since = time.monotonic()

    def _answers(self) -> bool:
        """Whether the small request is answered, or fails in any way but by waiting."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._generate_url, json.dumps(_PROBE).encode(), headers)
        try:
            _DIRECT.open(request, timeout=self._limit_s / 2).close()
        except urllib.error.HTTPError as error:
            error.close()
        except TimeoutError:
            return False
        except urllib.error.URLError as error:
            return not isinstance(error.reason, TimeoutError)
        except (OSError, http.client.HTTPException):  # the server has gone; others see to that
            return True
        return True


def _numbers(page: str | None) -> str | None:
    """The lines that tell of our models; None without a page."""
    if page is None:
        return None
    return "\n".join(line for line in page.splitlines() if line.startswith("nereid:"))
