"""Which names a server answers to.

A site can point a name of its own at this machine (DNS rebinding), so a browser's request is answered only if its Host
header names the server as the user does.
"""

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9_.-]+))(?::(?P<port>[0-9]{0,5}))?", re.ASCII)
_PORTS = {"http": 80, "https": 443}


class Host(NamedTuple):
    name: str  # in lower case; of an address, its one spelling
    port: int | None  # None where none is written


def parse(text: str) -> Host | None:
    """A Host header's name and port; None if it is anything else.

    parse("LocalHost:8765") == Host("localhost", 8765); parse("localhost:80.example") is None.
    """
    found = _HOST.fullmatch(text.lower())
    if found is None:
        return None
    port = int(found["port"]) if found["port"] else None
    address = _address(found["v6"] or found["name"])
    if (port or 0) > 65535 or bool(found["v6"]) != isinstance(address, ipaddress.IPv6Address):
        return None
    return Host(str(address or found["name"]), port)


def is_loopback(address: str) -> bool:
    """Whether a server that listens on this address is reached from its own machine alone."""
    known = _address(address)
    return known.is_loopback if known else address.lower() == "localhost"


def answered(address: str, allowed: Iterable[str] = ()) -> frozenset[str]:
    """The names that a server on this address answers to: loopback's and those `allowed`.

    Raises ValueError for an allowed name that is none, and if others can reach the server but none is allowed.
    """
    if not address:
        raise ValueError("the address to listen on is empty: --host takes a name or address, such as 127.0.0.1")
    if not address.isprintable():
        raise ValueError(f"{address[:60]!r} is not a name or an address to listen on")
    names = set()
    for each in allowed:
        host = parse(f"[{each}]" if each.count(":") > 1 and not each.startswith("[") else each)
        if host is None or host.port is not None or each.endswith(":"):
            raise ValueError(f"{each[:60]!r} is not a host name or address: --allow-host takes one, without a port")
        names.add(host.name)
    if is_loopback(address):
        return LOOPBACK | names | {str(_address(address) or address.lower())}
    if not names:
        raise ValueError(
            f"other machines can reach a server on {address}: --allow-host must give the name or address that they use"
        )
    return LOOPBACK | names


def refusal(host: str, origin: str | None, names: frozenset[str]) -> str | None:
    """Why a request with these headers is not answered by a server of these names; None if it is."""
    given = parse(host)
    if given is None:
        return f"the Host header must be a host name or address, with or without a port, got {host[:60]!r}"
    if given.name not in names:
        return f"this server is not {given.name[:60]!r}; it answers to {', '.join(sorted(names))}"
    if origin is not None:
        scheme, _, rest = origin.lower().partition("://")
        page = parse(rest)
        # A port that is not written is the scheme's own, on either side.
        default = _PORTS.get(scheme)
        same = page is not None and page.name == given.name and (page.port or default) == (given.port or default)
        if default is None or not same:
            return "requests from other sites' pages are not answered"
    return None


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
