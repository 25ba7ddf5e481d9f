"""Connections whose clients cannot keep others out.

uvicorn waits without an end for the headers of a request and for a client to read its response. Here both have a
deadline, and a connection that waits for its client makes room for a new one when there are many.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 256
HEADER_SECONDS = 5.0  # from a connection, or from its last response, to the end of the next request's headers
READ_SECONDS = 30.0  # for a client to read what is sent to it


class Connection(H11Protocol):
    """HTTP/1.1 with deadlines: a client that misses one is cut off."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reads = True
        self._awaits: str | None = None
        self._since = 0.0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()
        if len(self.connections) > MOST_CONNECTIONS:
            waiting = [each for each in self.connections if isinstance(each, Connection) and each._awaits]
            min(waiting, key=lambda each: each._since).cut_off()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._deadline:
            self._deadline.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reads = False
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reads = True
        self._look()

    def shutdown(self) -> None:
        self.cut_off()

    def cut_off(self) -> None:
        """End the connection at once, with what is on its way."""
        self.connections.discard(self)
        self.transport.abort()

    def _look(self) -> None:
        """Set a deadline if the connection now waits for another thing of its client than before."""
        if not self._reads or self.transport.is_closing():
            awaits, seconds = "reads", READ_SECONDS
        elif self.cycle is None or self.cycle.response_complete:
            awaits, seconds = "headers", HEADER_SECONDS
        elif self.cycle.more_body:
            awaits, seconds = "body", None  # the application has its own deadline, and says so to the client
        else:
            awaits, seconds = None, None
        if awaits == self._awaits:
            return
        self._awaits, self._since = awaits, self.loop.time()
        if self._deadline:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self.cut_off) if seconds is not None else None
