"""HTTP server in front of another one. It forwards requests, and breaks connections or refuses files when a test says so."""

from __future__ import annotations

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_FORBIDDEN = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class BrokenServer:
    """Proxy of the server at ``host:port``.

    Attributes:
        address: ``host:port`` of the proxy.
        breaks: part of paths whose bodies end in the middle, if their requests have a range or are gets. Empty: none.
        forbids: part of paths that are answered with 403. Empty: none.
        broken: number of connections that were broken.
        requests: method and path of each request.
    """

    def __init__(self, host: str, port: int) -> None:
        self.breaks, self.forbids, self.broken, self._is_closed = "", "", 0, False
        self.requests: list[str] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                """Prints nothing."""

            def _forward(self) -> None:
                sent = self._body()
                if proxy._is_closed:  # connections outlive the server
                    self.close_connection = True
                    return
                proxy.requests.append(f"{self.command} {self.path}")
                if proxy.forbids and proxy.forbids in self.path:
                    self._answer(403, {"Content-Type": "application/xml"}, _FORBIDDEN)
                    return
                connection = http.client.HTTPConnection(host, port, timeout=60)
                headers = {k: v for k, v in self.headers.items() if k.lower() != "transfer-encoding"}
                connection.request(self.command, self.path, sent, headers)
                response = connection.getresponse()
                body = response.read()
                self._answer(response.status, dict(response.getheaders()), body)
                connection.close()

            def _body(self) -> bytes | None:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    length = int(self.headers.get("Content-Length") or 0)
                    return self.rfile.read(length) if length else None
                found = b""
                while size := int(self.rfile.readline(), 16):
                    found += self.rfile.read(size)
                    self.rfile.readline()
                while self.rfile.readline().strip():  # trailing headers
                    pass
                return found

            def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response_only(status)
                left_out = ("transfer-encoding", "content-length", "connection")
                for name, value in headers.items():
                    if name.lower() not in left_out:
                        self.send_header(name, value)
                is_head = self.command == "HEAD"
                own = next((v for k, v in headers.items() if k.lower() == "content-length"), str(len(body)))
                self.send_header("Content-Length", own if is_head else str(len(body)))
                self.end_headers()
                if is_head:
                    return
                if proxy.breaks and proxy.breaks in self.path:
                    proxy.broken += 1
                    self.wfile.write(body[: len(body) // 2])
                    self.wfile.flush()
                    self.close_connection = True
                    return
                self.wfile.write(body)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
