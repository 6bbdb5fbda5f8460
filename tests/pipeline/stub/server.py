"""A small real server: /health, /v1/models, /v1/completions, and two workers that it leaves behind.

One left its session; the other left session, parents and environment (a double fork without the cookie): only a
subreaper still has it.
"""

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORKER = "import os, time; os.setsid(); time.sleep(600)"
STRAY = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
time.sleep(600)
"""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({"data": [{"id": "stub"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.reply({"choices": [{"text": "x", "index": 0, "finish_reason": "length"}]})

    def reply(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def main(port: int) -> None:
    subprocess.Popen([sys.executable, "-S", "-c", WORKER])
    subprocess.run([sys.executable, "-S", "-c", STRAY, "stray.pid"], env={}, check=True)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # leaves the worker behind, as crashed servers do
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
