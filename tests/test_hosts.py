"""Which requests a server takes to be meant for it."""

import pytest

from fused_softmax.trace.server import hosts


@pytest.mark.parametrize(
    ("text", "name", "port"),
    [
        ("localhost", "localhost", None),
        ("LocalHost:8765", "localhost", 8765),
        ("localhost:", "localhost", None),
        ("127.0.0.1:80", "127.0.0.1", 80),
        ("[::1]", "::1", None),
        ("[0:0:0:0:0:0:0:1]:65535", "::1", 65535),
        ("a-b.example:0", "a-b.example", 0),
    ],
)
def test_a_host(text, name, port):
    assert hosts.parse(text) == (name, port)


@pytest.mark.parametrize(
    "text",
    [
        "", ":80", "::1", "[::1", "[::1]x", "[localhost]", "[127.0.0.1]", "[:::]", "localhost:80:80", "localhost:65536",
        "localhost:080000", "localhost:8o", "localhost:80.example", "evil.example@localhost", "localhost ",
        "localhost:٣", "localhost,evil.example", "localhost/", "localhost\n", "lοcalhost", "http://localhost",
    ],
)  # fmt: skip
def test_no_host(text):
    assert hosts.parse(text) is None


@pytest.mark.parametrize(
    ("address", "allowed", "more"),
    [
        ("127.0.0.1", (), set()),
        ("localhost", (), set()),
        ("::1", (), set()),
        ("127.0.0.2", (), {"127.0.0.2"}),
        ("127.0.0.1", ("Box.example",), {"box.example"}),
        ("0.0.0.0", ("192.168.0.7", "box"), {"192.168.0.7", "box"}),
        ("::", ("fe80:0::1", "[fe80::2]"), {"fe80::1", "fe80::2"}),
    ],
)
def test_what_a_server_answers_to(address, allowed, more):
    assert hosts.answered(address, allowed) == {"localhost", "127.0.0.1", "::1"} | more


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.0.7", "box", "localhost.example"])
def test_other_addresses_need_a_name(address):
    with pytest.raises(ValueError, match="--allow-host"):
        hosts.answered(address)


def test_no_address_is_none_to_listen_on():
    with pytest.raises(ValueError, match="the address to listen on is empty"):
        hosts.answered("")


@pytest.mark.parametrize("name", ["", "*", "box:80", "box:", "http://box", "[::1]:80", "a b"])
def test_what_cannot_be_allowed(name):
    with pytest.raises(ValueError, match="is not a host name or address"):
        hosts.answered("0.0.0.0", [name])


@pytest.mark.parametrize(
    ("host", "origin", "said"),
    [
        ("localhost:1", None, None),
        ("localhost:1", "http://localhost:1", None),
        ("localhost", "http://localhost:80", None),
        ("box:443", "https://box", None),
        ("localhost:1", "http://localhost:2", "other sites"),
        ("localhost:1", "http://127.0.0.1:1", "other sites"),
        ("localhost:1", "null", "other sites"),
        ("localhost:1", "file://localhost:1", "other sites"),
        ("localhost:1", "http://localhost:1@evil.example", "other sites"),
        ("evil.example", "http://evil.example", "not 'evil.example'; it answers to 127.0.0.1, ::1, box, localhost"),
        ("localhost.evil.example", None, "this server is not"),
        ("evil localhost", None, "must be a host name or address"),
    ],
)
def test_refusals(host, origin, said):
    found = hosts.refusal(host, origin, hosts.LOOPBACK | {"box"})
    assert found is None if said is None else said in found
