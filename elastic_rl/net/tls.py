"""TLS contexts that follow their files: a certificate or authority renewed on disk is used without a restart."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from elastic_rl.errors import ElasticRLError

log = logging.getLogger(__name__)

RECHECK_S = 10.0
"""A renewed file is used this many seconds after it was written, at the latest."""


@dataclass(frozen=True)
class TlsFolder:
    """The PEM files with the certificate that a cluster's authority has issued to a host (``net.authority``)."""

    folder: Path

    @property
    def ca(self) -> Path:
        """The authority's certificate."""
        return self.folder / "ca.pem"

    @property
    def cert(self) -> Path:
        return self.folder / "host.pem"

    @property
    def key(self) -> Path:
        return self.folder / "host.key"


_Fingerprint = tuple[tuple[int, int, int] | None, ...]


class ReloadingContext:
    """The newest ``ssl.SSLContext`` that the files on disk allow.

    A file counts as changed when its inode, size or modification time differs, which covers files that are written in
    place, renamed over, or swapped behind a symbolic link (cert-manager, Kubernetes secrets). While the files do not
    fit together, because only one of them has been replaced yet, the previous context stays in use and the reload is
    retried. Safe to share between threads.
    """

    def __init__(self, build: Callable[[], ssl.SSLContext], files: Iterable[Path | str], *,
                 recheck_s: float = RECHECK_S, clock: Callable[[], float] = time.monotonic) -> None:
        """``build`` makes a context from ``files``. ``recheck_s``: shortest pause between two checks of the files.

        Raises whatever the first call of ``build`` raises. When a later call raises ElasticRLError, OSError
        (``ssl.SSLError`` is one) or ValueError, that is logged and the previous context stays in use.
        """
        self._build, self._files = build, [Path(f).expanduser() for f in files if f]
        self._recheck_s, self._clock = recheck_s, clock
        self._lock = threading.Lock()
        self._loaded = self._fingerprint()
        self._failed: _Fingerprint | None = None
        self._context = build()
        self._checked_at = clock()

    def current(self) -> ssl.SSLContext:
        """The context for the next connection. Reads the files again when they have changed."""
        with self._lock:
            if self._clock() - self._checked_at >= self._recheck_s:
                self._checked_at = self._clock()
                self._reload()
            return self._context

    def for_server(self) -> ssl.SSLContext:
        """A context for a server that keeps the one it was given, such as uvicorn: each handshake uses ``current()``.

        Sessions cannot be resumed, since a resumed one would skip the check against a new authority.
        """
        outer = self._build()
        outer.num_tickets = 0
        outer.options |= ssl.OP_NO_TICKET

        def use_current(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self.current()

        outer.sni_callback = use_current  # type: ignore[assignment]  # called for clients that send no name, too
        return outer

    def _reload(self) -> None:
        found = self._fingerprint()  # before the files are read: a change in between is found by the next check
        if found == self._loaded:
            return
        try:
            self._context = self._build()
        except (ElasticRLError, OSError, ValueError) as e:
            if found != self._failed:
                log.error("TLS files %s cannot be reloaded, the previous ones stay in use: %s",
                          ", ".join(map(str, self._files)), e)
            self._failed = found
            return
        self._loaded, self._failed = found, None
        log.info("reloaded TLS files %s", ", ".join(map(str, self._files)))

    def _fingerprint(self) -> _Fingerprint:
        return tuple(_stat(file) for file in self._files)


def _stat(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
