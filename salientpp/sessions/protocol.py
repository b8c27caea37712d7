"""Words of the protocol between a storage server and its clients: addresses, lines, greetings, and the limits of each.

Both sides send lines of UTF-8 JSON, each an object that ends with a newline. The server sends its greeting first. The client answers with its
own greeting and the proof that it knows the token. The server answers with its proof, or with ``{"error": text}``, and closes::

    {"salientpp": "0.1.0", "wire": 13, "nonce": HEX}
    {"salientpp": "0.1.0", "wire": 13, "nonce": HEX, "proof": HEX}
    {"proof": HEX}

After that, the client sends requests ``{"do": NAME, ...}``. The server sends one line for each, and ``{"error": text}`` for a mistake. If a session
cannot go on, the server sends ``{"lost": text}`` unasked to its clients, which pass it on to the other storage hosts. The text is empty if the session
has ended well.
**The greeting never changes**, so that any two versions can tell each other which they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from salientpp.ranks.greeting import WIRE_FORMAT
from salientpp.versions import own_version

SCHEME = "salientpp://"

#: Largest lines in bytes: a greeting, a request, and a reply of the server, which may hold a manifest.
MOST_GREETING, MOST_REQUEST, MOST_REPLY = 4 * 2**10, 64 * 2**10, 256 * 2**20

#: Longest time, in seconds, between two beats of a client that opened or attends a session.
BEAT_SECONDS = 2.0


class StorageError(OSError):
    """A storage server cannot be reached, is not one, or refuses a request. The text names its address."""


class Address(NamedTuple):
    """Host and port of a storage server. ``str()`` gives ``host:port``, with brackets around an IPv6 host."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_address(text: object) -> bool:
    """True if a path or text means a storage server: it begins with ``salientpp:``."""
    return str(text).startswith("salientpp:/")


def parse_address(text: str) -> Address:
    """Parses ``host:port`` or ``salientpp://host:port``. An IPv6 host has brackets: ``[::1]:29500``.

    Raises:
        ValueError: the text has another form, or the port is not in [0, 65535].
    """
    rest = text.removeprefix(SCHEME).removesuffix("/")
    host, colon, port = rest.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if in_brackets else host
    is_host = bool(host) and (in_brackets or ":" not in host) and not set(host) & set("[]/@?# \t\r\n")
    if not (colon and is_host and port.isascii() and port.isdecimal() and int(port[:6]) < 2**16):
        raise ValueError(
            f"an address of a storage server must be HOST:PORT or {SCHEME}HOST:PORT with a port below 65536, such as node7:29500 or [::1]:29500, got {text!r}"
        )
    return Address(host, int(port))


def line_of(values: Mapping[str, Any]) -> bytes:
    """Returns an object as a line."""
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def values_of(line: bytes) -> dict[str, Any]:
    """Returns the object that a line holds. The line may come from anyone.

    Raises:
        ValueError: the line holds no object. The text shows how it begins.
    """
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ValueError(f"expected a line with a JSON object, got {shown(line)}")
    return values


def shown(line: bytes) -> str:
    """Returns the beginning of a line as printable text, for an error."""
    return repr(bytes(line[:40])).removeprefix("b") + ("..." if len(line) > 40 else "")


def readable(value: object, most: int) -> str:
    """Returns at most about ``most`` characters of a text that came from outside, for an error or a log. Control characters are escaped."""
    text = str(value)[:most]
    return text if text.isprintable() else ascii(text)[1:-1]


def greeting(nonce: str) -> dict[str, Any]:
    """Returns this side's greeting, without a proof."""
    return {"salientpp": own_version(), "wire": WIRE_FORMAT, "nonce": nonce}


def describe_difference(server: Mapping[str, Any], client: Mapping[str, Any]) -> str | None:
    """Returns the error text for greetings of different versions, or None."""
    if all(server.get(name) == client.get(name) for name in ("salientpp", "wire")):
        return None
    versions = [
        f"{readable(each.get('salientpp'), 40)} with wire format {readable(each.get('wire'), 10)}"
        for each in (server, client)
    ]
    return (
        f"a storage server and its clients must run the same version of salientpp, got {versions[0]} on the server and {versions[1]} on the client; "
        "install the same version on both, and start both again"
    )
