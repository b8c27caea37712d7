"""Token that a storage server and its clients share, and the proofs that each side knows it.

The token itself never travels. Each side sends an HMAC-SHA256 of both sides' random numbers, with the token as its key. The traffic is not
encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Literal

#: Environment variable that holds the token.
VARIABLE = "SALIENTPP_TOKEN"

#: Lowest number of characters of a token.
LEAST_CHARACTERS = 16

_HOW_TO_MAKE = 'make one with: python -c "import secrets; print(secrets.token_hex(16))"'


def find_token(file: str | Path | None = None) -> str:
    """Returns the token that ``file`` holds; if None, the value of the environment variable ``SALIENTPP_TOKEN``.

    Raises:
        ValueError: there is no token, it is too short, or other users may read the file.
        OSError: the file cannot be read.
    """
    if file is None:
        token, where = os.environ.get(VARIABLE, "").strip(), f"the environment variable {VARIABLE}"
        if not token:
            raise ValueError(
                f"a storage server and its clients need a shared token, but {where} is not set; set the same value on all of them, and {_HOW_TO_MAKE}"
            )
    else:
        token, where = _read(Path(file)).strip(), str(file)
    if len(token) < LEAST_CHARACTERS or not token.isprintable():
        raise ValueError(
            f"the token in {where} must have at least {LEAST_CHARACTERS} printable characters, got {len(token)}; {_HOW_TO_MAKE}"
        )
    return token


def _read(file: Path) -> str:
    with file.open("rb") as opened:
        mode = os.fstat(opened.fileno()).st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError(
                f"the token in {file} must be readable by its owner only, got mode {stat.S_IMODE(mode):04o}; run: chmod 600 {file}"
            )
        # One byte more than any token needs, so that a wrong file is not read whole.
        return opened.read(4097).decode(errors="replace")


def new_nonce() -> str:
    """Returns a random number as 32 hexadecimal digits. Each side of a connection sends its own."""
    return secrets.token_hex(16)


def proof(token: str, side: Literal["client", "server"], server_nonce: str, client_nonce: str) -> str:
    """Returns the proof, as hexadecimal digits, that ``side`` knows the token."""
    # A separator, so that no other pair of random numbers gives the same text.
    text = f"{side}\n{server_nonce}\n{client_nonce}"
    return hmac.new(token.encode(), text.encode(errors="replace"), hashlib.sha256).hexdigest()


def is_proof(text: object, expected: str) -> bool:
    """Compares a proof with the expected one, in a time that does not depend on their contents."""
    return isinstance(text, str) and hmac.compare_digest(text.encode(errors="replace"), expected.encode())
