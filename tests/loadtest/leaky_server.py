"""A fake server whose requests cause leaks, with the pages that the check for leaks reads.

    python leaky_server.py PORT

POST /open leaves files open, /grow uses memory, /zombie leaves a zombie process, and /work adds a
request that never ends.
"""

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HELD = []
_64_MIB = 64 * 2**20
STATE = {"num_requests": 0}


def leak(path):
    """Cause the leak that belongs to a path of the server."""
    if path == "/open":
        HELD.extend(open(os.devnull) for _ in range(10))  # noqa: SIM115 - they stay open
    elif path == "/grow":
        HELD.append(bytes([1]) * _64_MIB)
    elif path == "/zombie":
        HELD.append(subprocess.Popen(["true"]))
    elif path == "/work":
        STATE["num_requests"] += 1


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # A connection stays open between requests.

    def do_GET(self):
        if self.path == "/metrics":
            page = f'nereid:num_requests{{model_name="llm"}} {STATE["num_requests"]}\n'
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_blocks_used"):
                page += f"nereid:{name} 0\n"
            self.answer(page + 'nereid:request_success_total{finished_reason="stop"} 3\n')
        else:
            self.answer(json.dumps({"num_requests": STATE["num_requests"]}))

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        leak(self.path)
        choice = {"index": 0, "text": "done", "finish_reason": "stop"}
        self.answer(json.dumps({"choices": [choice], "usage": {"completion_tokens": 1}}))

    def answer(self, text):
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
