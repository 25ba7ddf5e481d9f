"""Serves the page, and records the matrices that its reader asks for.

No part of a request runs: it names a kernel of the registry and holds numbers. Sizes are limited before anything is
parsed. A recording is made in a process of its own, which is killed when it is late; only a few run at a time. The
server answers only to the names it is given (`hosts.py`), so that no site can reach it under a name of its own. It
takes only JSON, which no form of another site can send. No client can keep others out (`connections.py`).
"""

import asyncio
import gc
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fused_softmax.trace import asked as asking
from fused_softmax.trace.entries.catalogue import kernels
from fused_softmax.trace.recorder.memory import RecordingError
from fused_softmax.trace.server import hosts
from fused_softmax.trace.server.connections import Connection
from fused_softmax.trace.server.worker import Late, Worker

MOST_BYTES = 2**18
PIECE_BYTES = 2**16
SECONDS = 5.0  # of a recording
BODY_SECONDS = 10.0  # for a request to arrive
WORKERS = 2
MOST_WAITING = 8
FIELDS = ("kernel", "matrix", "block", "dtype")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
        "font-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def app(
    page: str, names: frozenset[str] = hosts.LOOPBACK, *, seconds: float = SECONDS, workers: int = WORKERS
) -> Starlette:
    """The server: `GET /` is the page, `GET /kernels` lists kernels and limits, `POST /record` makes a recording.

    names: the hosts it answers to. seconds: how long a recording may take. workers: how many are made at a time.
    `app.state.stop()` ends the recordings that are being made.
    """
    pool = _Pool(workers, seconds)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        pool.open()
        try:
            yield
        finally:
            await pool.close()

    shown = _InPieces(page, media_type="text/html", headers=HEADERS)

    async def index(_: Request) -> Response:
        return shown

    async def known(_: Request) -> Response:
        limits = {"elements": asking.MOST_ELEMENTS, "block": asking.MOST_BLOCK, "bytes": MOST_BYTES, "seconds": seconds}
        names = ("name", "title", "summary", "operation", "block", "dtypes")
        found = [{name: getattr(kernel, name) for name in names} for kernel in kernels().values()]
        return JSONResponse({"kernels": found, "limits": limits}, headers=HEADERS)

    async def record(request: Request) -> Response:
        wanted = _asked(await _body(request))
        return JSONResponse(await pool.record(wanted), headers=HEADERS)

    routes = [
        Route("/", index),
        Route("/kernels", known),
        Route("/record", record, methods=["POST"]),
    ]
    handlers: Any = {HTTPException: _refused, Exception: _failed}
    middleware = [Middleware(_Names, names=names)]
    made = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=middleware)
    made.state.stop = pool.stop
    return made


def serve(page: str, host: str, port: int, say: Callable[[str], None], names: frozenset[str] = hosts.LOOPBACK) -> None:
    """Serve until interrupted. Calls `say` with the address once it answers. Port 0 takes any free port.

    names: the hosts it answers to, by `hosts.answered`. Raises OSError if it cannot listen, or what `say` raises.
    """
    served = app(page, names)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * PIECE_BYTES)  # of every connection
    shown = f"[{host}]" if ":" in host else host
    gc.freeze()  # or the interpreter searches all of torch for cycles when it ends, which takes a second
    address = f"http://{shown}:{listening.getsockname()[1]}"
    with suppress(KeyboardInterrupt):
        config = uvicorn.Config(
            served, http=Connection, ws="none", log_level="error", access_log=False, server_header=False,
            proxy_headers=False, backlog=128, timeout_graceful_shutdown=1,
        )  # fmt: skip
        server = _Server(config, lambda: say(address), served.state.stop)
        server.run(sockets=[listening])
        if server.unsaid:
            raise server.unsaid


class _InPieces(Response):
    """A response that is handed over as the client reads it, so that one who does not read holds one piece."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for begin in range(0, len(self.body), PIECE_BYTES):
            piece = self.body[begin : begin + PIECE_BYTES]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Server(uvicorn.Server):
    """Says when it answers, and stops recordings before it waits for what is under way.

    unsaid: why it could not say so, which ends it; uvicorn would log a traceback.
    """

    unsaid: OSError | None = None

    def __init__(self, config: uvicorn.Config, say: Callable[[], None], stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._say, self._stop = say, stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        try:
            self._say()
        except OSError as error:
            self.unsaid, self.should_exit = error, True
            self._stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stop()
        await super().shutdown(sockets)


class _Pool:
    """Workers that make recordings, and a short queue for them."""

    def __init__(self, size: int, seconds: float) -> None:
        self._workers = [Worker() for _ in range(size)]
        self._free: asyncio.Queue[Worker] = asyncio.Queue()
        self._seconds = seconds
        self._waiting = 0
        self._starting: set[asyncio.Future[Any]] = set()

    def open(self) -> None:
        """Start all workers, so that no request waits for an import."""
        for worker in self._workers:
            self._start(worker)
            self._free.put_nowait(worker)

    def stop(self) -> None:
        """Kill all workers; what they were asked for fails."""
        for worker in self._workers:
            worker.kill()

    async def close(self) -> None:
        self.stop()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for worker in self._workers:
            worker.close()

    async def record(self, wanted: asking.Asked) -> dict[str, Any]:
        if self._waiting >= MOST_WAITING:
            raise HTTPException(503, "too many recordings are in the queue; ask again in a few seconds")
        self._waiting += 1
        try:
            worker = await self._free.get()
        finally:
            self._waiting -= 1
        # If the client goes away, its worker becomes free when the recording is done, which is soon.
        return await asyncio.shield(asyncio.ensure_future(self._record(worker, wanted)))

    async def _record(self, worker: Worker, wanted: asking.Asked) -> dict[str, Any]:
        try:
            return await asyncio.to_thread(worker.ask, wanted.request(), self._seconds)
        except Late as error:
            self._start(worker)
            raise HTTPException(422, f"the recording {error}") from None
        except (RecordingError, ValueError) as error:
            raise HTTPException(422, str(error)) from None
        finally:
            self._free.put_nowait(worker)

    def _start(self, worker: Worker) -> None:
        future = asyncio.ensure_future(asyncio.to_thread(worker.start))
        self._starting.add(future)
        future.add_done_callback(self._starting.discard)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # the next request meets it again


async def _body(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "a request must be JSON, with Content-Type: application/json")
    too_large = HTTPException(413, f"a request may have at most {MOST_BYTES} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > MOST_BYTES):
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, f"the request did not arrive within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the request did not arrive") from None
    return bytes(body)


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
    except json.JSONDecodeError as error:
        raise HTTPException(400, f"not JSON: {error}") from None
    except UnicodeDecodeError:
        raise HTTPException(400, "not JSON: not UTF-8") from None
    except RecursionError:
        raise HTTPException(400, "the JSON is nested too deeply") from None
    except ValueError as error:
        raise HTTPException(400, "an integer with too many digits" if "digits" in str(error) else str(error)) from None
    if not isinstance(request, dict):
        raise HTTPException(400, 'a request must be an object: {"kernel": ..., "matrix": [[...], ...]}')
    if unknown := sorted(request.keys() - set(FIELDS)):
        raise HTTPException(400, f"unknown field {unknown[0][:40]!r}; a request has {', '.join(FIELDS)}")
    if missing := [name for name in FIELDS[:2] if name not in request]:
        raise HTTPException(400, f"{missing[0]} is missing")
    try:
        return asking.asked(*(request.get(name) for name in FIELDS))
    except ValueError as error:
        raise HTTPException(400, str(error)) from None


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = HEADERS | dict(error.headers or {}) | ({"Retry-After": "3"} if error.status_code == 503 else {})
    return JSONResponse({"error": error.detail}, error.status_code, headers=headers)


async def _failed(_: Request, __: Exception) -> Response:
    return JSONResponse({"error": "the server failed; its log says why"}, 500, headers=HEADERS)


class _Names:
    """Refuses requests that use another name for the server, or come from another site's page."""

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        self._app, self._allowed = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given: dict[bytes, str] = {name: value.decode("latin-1") for name, value in scope["headers"]}
            if wrong := hosts.refusal(given.get(b"host", ""), given.get(b"origin"), self._allowed):
                await JSONResponse({"error": wrong}, 403, headers=HEADERS)(scope, receive, send)
                return
        await self._app(scope, receive, send)
