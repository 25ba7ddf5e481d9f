"""Serves the page, and records the matrices that its reader asks for.

No part of a request runs: it names a kernel of the registry and holds numbers. Sizes are limited before anything is
parsed. A recording is made in a process of its own, which is killed when it is late; only a few run at a time. A server
on loopback answers only to loopback's names, so that no site can reach it under a name of its own (DNS rebinding). It
takes only JSON, which no form of another site can send.
"""

import asyncio
import ipaddress
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fused_softmax.trace import asked as asking
from fused_softmax.trace.memory import RecordingError
from fused_softmax.trace.registry import kernels
from fused_softmax.trace.worker import Late, Worker

MOST_BYTES = 2**18
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


def app(page: str, host: str = "127.0.0.1", *, seconds: float = SECONDS, workers: int = WORKERS) -> Starlette:
    """The server: `GET /` is the page, `GET /kernels` lists kernels and limits, `POST /record` makes a recording.

    host: the address it listens on. seconds: how long a recording may take. workers: how many are made at a time.
    """
    pool = _Pool(workers, seconds)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        pool.open()
        try:
            yield
        finally:
            await pool.close()

    async def index(_: Request) -> Response:
        return HTMLResponse(page, headers=HEADERS)

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
    middleware = [Middleware(_Names, names=_names(host))]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=middleware)


def serve(page: str, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve until interrupted. Calls `say` with the address once it listens. Port 0 takes any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family)
    shown = f"[{host}]" if ":" in host else host
    say(f"http://{shown}:{listening.getsockname()[1]}")
    config = uvicorn.Config(
        app(page, host), log_level="warning", access_log=False, server_header=False, limit_concurrency=64,
        timeout_graceful_shutdown=3,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[listening])


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

    async def close(self) -> None:
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


def _names(host: str) -> frozenset[str] | None:
    """The names that a server on this host answers to. None if others can reach it, under names of their own."""
    name = host.strip("[]").lower()
    try:
        loopback = ipaddress.ip_address(name).is_loopback
    except ValueError:
        loopback = name == "localhost"
    return frozenset({"localhost", "127.0.0.1", "::1", name}) if loopback else None


class _Names:
    """Refuses requests that use another name for the server, or come from another site's page."""

    def __init__(self, app: ASGIApp, names: frozenset[str] | None) -> None:
        self._app, self._allowed = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given: dict[bytes, str] = {name: value.decode("latin-1") for name, value in scope["headers"]}
            host, origin = given.get(b"host", ""), given.get(b"origin")
            name = _name(host)
            wrong = None
            if self._allowed is not None and name not in self._allowed:
                wrong = f"this server is not {name[:60]!r}; it answers to {', '.join(sorted(self._allowed))}"
            elif origin is not None and origin.partition("://")[2].lower() != host.lower():
                wrong = "requests from other sites' pages are not answered"
            if wrong:
                await JSONResponse({"error": wrong}, 403, headers=HEADERS)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _name(host: str) -> str:
    """The name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()
