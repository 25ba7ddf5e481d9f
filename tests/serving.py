"""Starts the server as a process of its own, and asks it."""

import http.client
import json
import re
import select
import subprocess
import sys

SERVER = """
import sys
from fused_softmax.trace.server import serve
serve.BODY_SECONDS = serve.HEADER_SECONDS = serve.READ_SECONDS = 3.0
serve.SECONDS, serve.WORKERS, serve.MOST_WAITING = float(sys.argv[1]), 1, 2
serve.serve("<title>the page</title>" + " " * int(sys.argv[2]), "127.0.0.1", 0, lambda at: print(at, flush=True))
"""


def started(seconds, padding=0):
    """A server's process and port. Recordings may take `seconds`; its page has so many bytes of padding."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(seconds), str(padding)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert select.select([process.stdout], [], [], 120)[0], "the server says where it is"
    return process, int(process.stdout.readline().rpartition(":")[2])


def ask(port, method, path, body=None, headers=(), timeout=150):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    given = {"Content-Type": "application/json"} | dict(headers)
    try:
        connection.request(method, path, body, given)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def refused(port, body, status, message, **kwargs):
    found, _, answer = ask(port, "POST", "/record", body, **kwargs)
    assert (found, bool(re.search(message, json.loads(answer)["error"]))) == (status, True), answer
    still, _, _ = ask(port, "GET", "/")
    assert still == 200
