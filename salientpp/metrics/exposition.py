"""Offers the numbers of a loader to Prometheus, in its text format: from an HTTP endpoint or in a file."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socket import AF_INET, AF_INET6
from socketserver import ThreadingTCPServer
from types import TracebackType
from typing import Any

from salientpp.arguments import as_integer
from salientpp.files import write_whole
from salientpp.loader.metrics import Metric
from salientpp.metrics.series import HasMetrics, Reader
from salientpp.processes import after_fork

PREFIX = "salientpp_loader_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Unit -> ending of a name, by the conventions of Prometheus.
_ENDINGS = {"s": "seconds", "By": "bytes"}
#: Characters of a label's value that the format writes otherwise.
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def prometheus(
    loader: HasMetrics,
    port: int | None = None,
    path: str | Path | None = None,
    host: str = "127.0.0.1",
    name: str | None = None,
) -> Exposition:
    """Offers ``loader.metrics()`` to Prometheus: at ``http://HOST:PORT/metrics``, in a file, or both.

    The endpoint answers until the process ends or ``close()`` is called. The file is for node_exporter's textfile collector. It is written whenever
    ``write()`` is called, completely or not at all. Each rank has an endpoint or a file of its own. Each sample has the labels ``rank`` and ``loader``.
    The loader is not kept alive. A forked child has no endpoint.

    Args:
        loader: a loader of this package.
        port: port of the endpoint. 0: a free port. None: no endpoint.
        path: file, whose name ends in ``.prom``. None: no file.
        host: name or address at which the endpoint listens. The default lets no other machine read it; '' means all addresses.
        name: value of the label ``loader``, which tells apart the loaders of a process. None: a running number.

    Raises:
        OSError: the endpoint cannot listen there.
        ValueError: an argument is wrong.
    """
    if port is None and path is None:
        raise ValueError("prometheus(loader) needs port= for an HTTP endpoint, or path= for a file")
    number = None if port is None else as_integer(port)
    if port is not None and (number is None or not 0 <= number < 2**16):
        raise ValueError(f"port must be an integer from 0 to {2**16 - 1}, got {port!r}")
    if path is not None and not str(path).endswith(".prom"):
        raise ValueError(f"path must end in .prom, because node_exporter reads no other files, got {str(path)!r}")
    return Exposition(Reader(loader, name), number, None if path is None else Path(path), host)


class Exposition:
    """Endpoint or file with the numbers of a loader, made by :func:`prometheus`. As a context manager it closes the endpoint at the end.

    Attributes:
        port: port of the endpoint; None without one, as in a forked child.
        path: the file; None without one.
    """

    def __init__(self, reader: Reader, port: int | None, path: Path | None, host: str) -> None:
        self.path = path
        self.port: int | None = None
        self._reader = reader
        self._server: _Server | None = None
        if port is None:
            return
        after_fork(self)
        try:
            self._server = _Server(host, port, reader)
        except OSError as error:
            raise OSError(
                error.errno,
                f"port {port} of {host or 'all addresses'} cannot be used ({error.strerror or error}); pass another port for each rank of a host, or "
                "port=0 for a free one",
            ) from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="salientpp-prometheus", daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Returns the present numbers in the text format."""
        return text_of(self._reader)

    def write(self) -> None:
        """Writes the present numbers to the file.

        Raises:
            OSError: the file cannot be written.
            ValueError: there is no file, because ``path`` was not given.
        """
        if self.path is None:
            raise ValueError("write() needs a file: pass path= to prometheus()")
        write_whole(self.path, lambda file: file.write(self.text().encode()))

    def close(self) -> None:
        """Closes the endpoint. Later calls do nothing."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()

    def _after_fork(self) -> None:
        """Closes the child's copy of the socket, which would keep the port in use. No thread of the child serves it."""
        server, self._server, self.port = self._server, None, None
        if server is not None:
            server.socket.close()

    def __enter__(self) -> Exposition:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def text_of(reader: Reader) -> str:
    """Returns numbers in the text format, https://prometheus.io/docs/instrumenting/exposition_formats/."""
    rank, values = reader.read()
    families: dict[str, tuple[Metric, list[str]]] = {}
    for series, number in values:
        name = _name(series.name, series.metric)
        words = (("rank", str(rank)), ("loader", reader.name), *series.labels)
        labels = ",".join(f'{label}="{word.translate(_ESCAPED)}"' for label, word in words)
        families.setdefault(name, (series.metric, []))[1].append(f"{name}{{{labels}}} {_number(number)}")
    lines: list[str] = []
    for name, (metric, samples) in families.items():
        lines += [f"# HELP {name} {metric.text}", f"# TYPE {name} {metric.kind}", *samples]
    return "\n".join([*lines, ""])


def _name(name: str, metric: Metric) -> str:
    """Returns the name that Prometheus expects for a number: with its unit at the end, and then ``_total`` for a counter."""
    words: Sequence[str] = name.split(".")
    unit = _ENDINGS.get(metric.unit)
    ending = [*([unit] if unit and unit not in words else []), *(["total"] if metric.kind == "counter" else [])]
    return PREFIX + "_".join([*words, *ending])


def _number(number: float) -> str:
    return repr(float(number)) if math.isfinite(number) else {math.inf: "+Inf", -math.inf: "-Inf"}.get(number, "NaN")


class _Server(ThreadingTCPServer):
    """Server of HTTP. Unlike ``ThreadingHTTPServer`` it does not ask for the name of its address, which may take seconds."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, host: str, port: int, reader: Reader) -> None:
        self.reader = reader
        self.address_family = AF_INET6 if ":" in host else AF_INET
        super().__init__((host, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing about a client that has closed its connection."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10  # seconds for a client that sends nothing

    def do_GET(self) -> None:
        status, kind = 200, CONTENT_TYPE
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            status, text = 404, "the numbers are at /metrics\n"
        else:
            try:
                text = text_of(self.server.reader)
            except Exception as error:  # the loader's; the next request may succeed
                status, text = 500, f"the loader gave no numbers ({type(error).__name__}: {error})\n"
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *values: Any) -> None:
        """Prints nothing: a request every few seconds would fill the output of the training."""
