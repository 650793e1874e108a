"""Machines that are network namespaces on one bridge: the link of each can be cut."""

from __future__ import annotations

import os

from kvscope.lab.chaos.link import run_quietly


class Machine:
    """A namespace with an address that the others and this process reach."""

    def __init__(self, name: str, address: str, device: str) -> None:
        self.name, self.address, self._device = name, address, device
        self.prefix = ("ip", "netns", "exec", name)

    def set_link(self, is_up: bool) -> None:
        """Let packets pass, or not."""
        if not run_quietly("ip", "link", "set", self._device, "up" if is_up else "down"):
            raise RuntimeError(f"the link of {self.name} cannot be changed")


class Machines:
    """So many of them, if that is permitted. `reason`: why there are none."""

    def __init__(self, count: int) -> None:
        self.reason = ""
        self.machines: list[Machine] = []
        self._bridge = f"kvb{os.getpid() % 1_000_000}"
        self._subnet = f"10.78.{os.getpid() % 256}"
        self._run("ip", "link", "add", self._bridge, "type", "bridge")
        self._run("ip", "addr", "add", f"{self._subnet}.1/24", "dev", self._bridge)
        self._run("ip", "link", "set", self._bridge, "up")
        for number in range(count):
            self._add(number)

    def _run(self, *command: str) -> None:
        if not self.reason and not run_quietly(*command):
            self.reason = f"`{' '.join(command[:4])}` is not permitted or not installed"

    def _add(self, number: int) -> None:
        name = f"{self._bridge}-{number}"
        outside, inside = f"{self._bridge}o{number}", f"{self._bridge}i{number}"
        machine = Machine(name, f"{self._subnet}.{number + 10}", outside)
        self.machines.append(machine)
        self._run("ip", "netns", "add", name)
        self._run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
        self._run("ip", "link", "set", outside, "master", self._bridge)
        self._run("ip", "link", "set", outside, "up")
        self._run(*machine.prefix, "ip", "addr", "add", f"{machine.address}/24", "dev", inside)
        self._run(*machine.prefix, "ip", "link", "set", inside, "up")
        self._run(*machine.prefix, "ip", "link", "set", "lo", "up")

    def close(self) -> None:
        """Remove them."""
        for machine in self.machines:
            run_quietly("ip", "netns", "del", machine.name)
        run_quietly("ip", "link", "del", self._bridge)
