"""Serves the page, and records the matrices that its reader asks for.

No part of a request runs: it names a kernel of the registry and holds numbers. Sizes are limited before anything is
parsed. A recording is made in a process of its own, which is killed when it is late; only a few run at a time. The
server answers only to the names it is given (`hosts.py`), so that no site can reach it under a name of its own. It
takes only JSON, which no form of another site can send. No client can keep others out: each has a thread, and a
deadline for whatever the server awaits of it.
"""

import json
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from fused_softmax.trace import asked as asking
from fused_softmax.trace import run
from fused_softmax.trace.entries.kernel import kernels
from fused_softmax.trace.recorder.memory import RecordingError
from fused_softmax.trace.server import hosts
from fused_softmax.trace.server.worker import Worker

MOST_BYTES = 2**18
SECONDS = 5.0  # of a recording
HEADER_SECONDS = 5.0  # from a connection, or from its last response, to the end of the next request's headers
BODY_SECONDS = 10.0  # for the rest of a request to arrive
READ_SECONDS = 30.0  # for a client to read what is sent to it
WORKERS = 2
MOST_WAITING = 8
MOST_CONNECTIONS = 256
METHODS = {"/": "GET", "/kernels": "GET", "/record": "POST"}
FIELDS = ("kernel", "matrix", "block", "dtype")
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
        "font-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def serve(page: str, host: str, port: int, say: Callable[[str], None], names: frozenset[str] = hosts.LOOPBACK) -> None:
    """Serve until interrupted. Calls `say` with the address once it answers. Port 0 takes any free port.

    `GET /` is the page, `GET /kernels` lists kernels and limits, `POST /record` makes a recording. names: the hosts it
    answers to, by `hosts.answered`. Raises OSError if it cannot listen, or what `say` raises.
    """
    told = []

    def end(number: int, _: Any) -> None:
        told.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell leaves out of what it starts with &
    with suppress(KeyboardInterrupt), _Server(page, host, port, names) as server:
        shown = f"[{host}]" if ":" in host else host
        say(f"http://{shown}:{server.server_address[1]}")
        server.serve_forever(poll_interval=0.25)
    if told:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)


class _Refused(Exception):
    """A request that is not answered: an HTTP status, and why."""


class _Server(ThreadingTCPServer):
    """waiting: connections that wait for their clients, the longest first, with a deadline and what it shuts."""

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, page: str, host: str, port: int, names: frozenset[str]) -> None:
        self.page, self.names = page.encode(), names
        self.ended = False
        self.waiting: dict[socket.socket, tuple[float, int]] = {}
        self.workers = [Worker() for _ in range(WORKERS)]
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Client)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)  # of every connection
        self.free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self.places = threading.Semaphore(WORKERS + MOST_WAITING)
        for worker in self.workers:
            worker.start()  # so that no request waits for an import
            self.free.put(worker)

    def service_actions(self) -> None:
        """Cut off the clients that are late, and those that have waited longest if there are too many."""
        waiting = self.waiting.copy()
        for at, (connection, (deadline, what)) in enumerate(waiting.items()):
            if deadline < time.monotonic() or at < len(waiting) - MOST_CONNECTIONS:
                with suppress(OSError):
                    connection.shutdown(what)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client may leave at any time
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        """Cut off everybody, and wait until all threads have ended: torch aborts if the process ends within a call."""
        self.ended = True
        for worker in self.workers:
            worker.close()
        for connection in self.waiting.copy():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()


class _Client(BaseHTTPRequestHandler):
    """The requests of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def handle_one_request(self) -> None:
        self._await(HEADER_SECONDS)
        super().handle_one_request()

    def answer(self) -> None:
        # What is left of a body must not be read as a request: another site's page may have written it.
        self.close_connection |= "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        try:
            host = ", ".join(self.headers.get_all("Host", []))  # two names are none
            if wrong := hosts.refusal(host, self.headers.get("Origin"), self.server.names):
                raise _Refused(403, wrong)
            path = self.path.partition("?")[0]
            if path not in METHODS:
                raise _Refused(404, "there is no such page")
            if self.command != METHODS[path]:
                raise _Refused(405, f"{path} takes {METHODS[path]}")
            if path == "/":
                self._send(200, self.server.page, "text/html; charset=utf-8")
            else:
                self._say(200, known() if path == "/kernels" else self._record(_asked(self._body())))
        except _Refused as refused:
            self._say(*refused.args)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = answer

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no request at all."""
        self.close_connection = True
        self._say(code, message or "this is not an HTTP request")

    def finish(self) -> None:
        # A client that still sends would lose its answer if the connection ended now.
        with suppress(OSError):
            self._await(HEADER_SECONDS)
            self.connection.shutdown(socket.SHUT_WR)
            while self.connection.recv(MOST_BYTES):
                pass
        self.server.waiting.pop(self.connection, None)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of requests."""

    def _await(self, seconds: float, what: int = socket.SHUT_RDWR) -> None:
        self.server.waiting.pop(self.connection, None)
        self.server.waiting[self.connection] = time.monotonic() + seconds, what
        if self.server.ended:
            raise ConnectionAbortedError

    def _say(self, status: int, content: dict[str, Any] | str) -> None:
        content = {"error": content} if isinstance(content, str) else content
        self._send(status, json.dumps(content, separators=(",", ":"), allow_nan=False).encode(), "application/json")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        headers = HEADERS | {"content-type": kind, "content-length": str(len(content))}
        headers |= {"retry-after": "3"} if status == 503 else {}
        headers |= {"connection": "close"} if self.close_connection else {}
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self._await(READ_SECONDS)
        self.end_headers()
        self.wfile.write(content)

    def _body(self) -> bytes:
        if self.headers.get_content_type() != "application/json":
            raise _Refused(415, "a request must be JSON, with Content-Type: application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 18 or int(length) > MOST_BYTES:
            raise _Refused(413, f"a request must say its Content-Length, of at most {MOST_BYTES} bytes")
        self._await(BODY_SECONDS, socket.SHUT_RD)  # it can still be told so
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise _Refused(408, f"the request did not arrive within {BODY_SECONDS:g} s")
        return body

    def _record(self, wanted: asking.Asked) -> dict[str, Any]:
        server = self.server
        if not server.places.acquire(blocking=False):
            raise _Refused(503, "too many recordings are in the queue; ask again in a few seconds")
        del server.waiting[self.connection]  # its client waits for us
        worker = server.free.get()
        try:
            return worker.ask(run.kernel, wanted, timeout=SECONDS)
        except (RecordingError, ValueError) as error:
            raise _Refused(422, str(error)) from None
        finally:
            server.free.put(worker)
            server.places.release()


def known() -> dict[str, Any]:
    """The kernels that it records and the limits of what may be asked, as its page and `GET /kernels` have them."""
    limits = {"elements": asking.MOST_ELEMENTS, "block": asking.MOST_BLOCK, "bytes": MOST_BYTES, "seconds": SECONDS}
    names = ("name", "title", "summary", "operation", "block", "dtypes")
    found = [{name: getattr(kernel, name) for name in names} for kernel in kernels().values()]
    return {"kernels": found, "limits": limits}


def _asked(body: bytes) -> asking.Asked:
    def refuse(word: str) -> float:
        raise ValueError(f'{word} is not JSON; write "{word.replace("Infinity", "inf").lower()}", in quotes')

    def finite(text: str) -> float:
        value = float(text)
        if value in (float("inf"), -float("inf")):
            raise ValueError(f"{text[:40]} is too large for any float")
        return value

    try:
        request = json.loads(body, parse_constant=refuse, parse_float=finite)
        if not isinstance(request, dict):
            raise ValueError('a request must be an object: {"kernel": ..., "matrix": [[...], ...]}')
        if unknown := sorted(request.keys() - set(FIELDS)):
            raise ValueError(f"unknown field {unknown[0][:40]!r}; a request has {', '.join(FIELDS)}")
        if missing := [name for name in FIELDS[:2] if name not in request]:
            raise ValueError(f"{missing[0]} is missing")
        return asking.asked(*(request.get(name) for name in FIELDS))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _Refused(400, f"not JSON: {error}") from None
    except RecursionError:
        raise _Refused(400, "the JSON is nested too deeply") from None
    except ValueError as error:
        said = str(error)
        raise _Refused(400, "an integer with too many digits" if "integer string" in said else said) from None
