"""An HTTP server whose streamed responses are defined by a test and may be broken."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def chunk(text="", finish=None, usage=None):
    """Return a chunk of a streamed chat completion."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    choices = [choice] if usage is None else []
    return {"choices": choices, "usage": usage and {"completion_tokens": usage}}


def event(data):
    """Return a server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def stream(texts, *, finish="length", usage=None, done=True):
    """Return the server-sent events of a complete streamed chat completion."""
    events = [event(chunk(text)) for text in texts]
    events += [event(chunk(finish=finish))] if finish else []
    events += [event(chunk(usage=usage))] if usage is not None else []
    return events + ([event("[DONE]")] if done else [])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            self._answer(*self.server.answer(body))
        except OSError:
            self.server.num_lost_clients += 1

    def _answer(self, status, parts, has_end_marker=True):
        """Send the return value of the test's function, which `play` describes."""
        self.send_response(status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in parts:
            if isinstance(part, float):
                self.server.is_ending.wait(part)  # at the end of the test, stop waiting
                continue
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.flush()
        if has_end_marker:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = not has_end_marker

    def log_message(self, *args):
        pass


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # a burst of connections must not be refused


@contextmanager
def play(answer):
    """Run a server that answers each POST request with `answer(body)`, and yield the server.

    `answer` returns the HTTP status, the parts of the response body and, optionally, False. A part
    is either bytes to send or a float: the number of seconds to wait. With False, the server closes
    the connection without the end marker of the body.
    """
    server = _Server(("127.0.0.1", 0), _Handler)
    server.answer, server.num_lost_clients = answer, 0
    server.is_ending = threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.is_ending.set()
        server.shutdown()
        thread.join()
        server.server_close()
