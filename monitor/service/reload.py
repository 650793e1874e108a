"""Reads the configuration file again on SIGHUP, and changes what can change while the service runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from kvscope.monitor.service.service import Service, ServiceConfig
from kvscope.monitor.text import timestamp

logger = logging.getLogger(__name__)


class LoadedConfig(NamedTuple):
    """A configuration, and those of its settings that only a restart changes, by key."""

    config: ServiceConfig
    fixed: Mapping[str, object]


class ConfigurationView(msgspec.Struct, frozen=True, kw_only=True):
    """How the configuration file was read last. No value of a setting is in it.

    loaded_at: when the settings in force were read. error: where a file that was read since is wrong, so that it
    changed nothing. restart_needed: keys with values that only a restart puts in force. reloads, failures: since then.
    """

    loaded_at: str
    error: str = ""
    restart_needed: list[str] = []
    reloads: int = 0
    failures: int = 0


class Reloader(threading.Thread):
    """Loads the configuration again on request, on a thread of its own, and applies it to `service`.

    load: reads file, variables and flags. Raises ValueError, in whose `where` is what /healthz may show of it.
    """

    def __init__(self, service: Service, started: LoadedConfig, load: Callable[[], LoadedConfig]) -> None:
        super().__init__(name="kvscope-reload", daemon=True)
        self._service = service
        self._first = started
        self._load = load
        self._asked = threading.Event()
        self._stopping = False
        self._view = ConfigurationView(loaded_at=timestamp(time.time_ns()) or "")

    def request(self) -> None:
        """Ask for a reload. A signal handler may call it."""
        self._asked.set()

    def run(self) -> None:
        """Wait for requests until stopped."""
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._stopping:
                return
            try:
                self.reload()
            except Exception:
                logger.exception("the configuration was not reloaded in full")
                self._fail("see the log")

    def reload(self) -> None:
        """Read the configuration and apply it. A broken one changes nothing."""
        try:
            loaded = self._load()
        except ValueError as error:
            logger.error("the configuration was not reloaded, and the settings before it stay in force: %s", error)
            self._fail(getattr(error, "where", "see the log"))
            return
        fixed = [key for key, value in loaded.fixed.items() if value != self._first.fixed[key]]
        restart_needed = sorted({*fixed, *self._service.apply(loaded.config)})
        if restart_needed:
            logger.warning(
                "the configuration was reloaded. These take effect after a restart: %s", ", ".join(restart_needed)
            )
        else:
            logger.warning("the configuration was reloaded")
        self._view = ConfigurationView(
            loaded_at=timestamp(time.time_ns()) or "",
            restart_needed=restart_needed,
            reloads=self._view.reloads + 1,
            failures=self._view.failures,
        )

    def _fail(self, where: str) -> None:
        self._view = msgspec.structs.replace(self._view, error=where, failures=self._view.failures + 1)

    def view(self) -> ConfigurationView:
        """Report how the last reload went."""
        return self._view

    def stop(self) -> None:
        """End it, and wait until it has."""
        self._stopping = True
        self._asked.set()
        if self.ident is not None:
            self.join()
