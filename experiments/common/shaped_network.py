"""Hosts on one machine: two network namespaces, a link of a chosen rate between them.

Each namespace is a host with a loopback of its own; what leaves it passes a token bucket (`tc tbf`)
at the link's rate. Gloo binds to the address that the machine's own name resolves to, so each
namespace gets its own /etc/hosts. Needs Linux, root, iproute2 and taskset. Everything is removed in
the end, after errors and Ctrl-C too. After a SIGKILL, `ip netns list` shows what is left, under
names that begin with espalier-: `ip netns delete` each, and remove its folder in /etc/netns.
"""

import contextlib
import dataclasses
import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

# What passes unshaped after a pause. Small, that a message's first part is not free: 128 KiB are
# 0.5 ms of 2 Gbit/s; the largest packet that the kernel hands down has 64 KiB.
BURST = "128kb"
QUEUE = "50ms"
NAMESPACES = pathlib.Path("/etc/netns")


@dataclasses.dataclass(frozen=True)
class Host:
    """A place for processes.

    Attributes:
        namespace: its network namespace; None for the machine itself.
        address: at which the others find it.
        interface: the end of its link; None if it has none of its own.
    """

    namespace: str | None
    address: str
    interface: str | None

    def command(self, core: int, words: Sequence[str]) -> list[str]:
        """Returns the command that runs `words` on this host, on one core if that can be asked."""
        inside = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        pinned = ["taskset", "-c", str(core)] if shutil.which("taskset") else []
        return [*inside, *pinned, *words]


HERE = Host(None, "localhost", None)


def sent(interface: str | None) -> float:
    """Returns the bytes that left this process' host so far; NaN without an interface."""
    if interface is None:
        return float("nan")
    count = pathlib.Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    return float(count.read_text(encoding="ascii"))


def check_machine() -> None:
    """Refuses machines that cannot have hosts.

    Raises:
        RuntimeError: naming what is missing.
    """
    if not sys.platform.startswith("linux"):
        raise RuntimeError(f"Network namespaces are Linux's, this is {sys.platform}: use --smoke.")
    missing = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(
            f"{', '.join(missing)} not found: install iproute2 and util-linux, or use --smoke."
        )
    if os.geteuid() != 0:
        raise RuntimeError("Network namespaces need root: run as root, or use --smoke.")


@contextlib.contextmanager
def two_hosts(mbit: int) -> Iterator[tuple[Host, Host]]:
    """Sets up two hosts, and removes them.

    Args:
        mbit: rate of the link between them, Mbit/s each way.

    Yields:
        The hosts.

    Raises:
        RuntimeError: if the machine cannot, see `check_machine`, or a command fails.
    """
    check_machine()
    token = secrets.token_hex(3)
    first, second = (
        Host(f"espalier-{token}-{i}", f"10.77.0.{i + 1}", f"link{i}") for i in range(2)
    )
    hosts = (first, second)
    first_ever = not NAMESPACES.exists()
    try:
        for host in hosts:
            assert host.namespace
            folder = NAMESPACES / host.namespace
            folder.mkdir(parents=True)
            names = f"127.0.0.1 localhost\n{host.address} {socket.gethostname()}\n"
            (folder / "hosts").write_text(names, encoding="ascii")
            _do("ip", "netns", "add", host.namespace)
        ends = [("name", str(host.interface), "netns", str(host.namespace)) for host in hosts]
        _do("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host in hosts:
            inside = ("ip", "-n", str(host.namespace))
            link = str(host.interface)
            _do(*inside, "address", "add", f"{host.address}/24", "dev", link)
            _do(*inside, "link", "set", "lo", "up")
            _do(*inside, "link", "set", link, "up")
            shape = ("tbf", "rate", f"{mbit}mbit", "burst", BURST, "latency", QUEUE)
            _do("tc", "-n", str(host.namespace), "qdisc", "replace", "dev", link, "root", *shape)
        yield hosts
    finally:
        for host in hosts:
            assert host.namespace
            # With the namespaces go the ends of the link.
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True)
            shutil.rmtree(NAMESPACES / host.namespace, ignore_errors=True)
        if first_ever:
            with contextlib.suppress(OSError):
                NAMESPACES.rmdir()


def free_port() -> int:
    """Returns a port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def run_together(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str], limit: float
) -> None:
    """Runs processes that need each other, and ends all if one fails.

    Args:
        commands: one a process.
        environment: of all.
        limit: seconds until they must have ended.

    Raises:
        RuntimeError: with the last errors of the first process that failed.
    """
    with contextlib.ExitStack() as stack:
        running = []
        for words in commands:
            errors = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))
            process = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
            )
            # Last in, first out: killed before its file is closed, and before hosts are removed.
            stack.callback(_end, process)
            running.append((process, errors))
        deadline = time.monotonic() + limit
        while True:
            states = [process.poll() for process, _ in running]
            failed = [number for number, state in enumerate(states) if state]
            if failed or (None in states and time.monotonic() > deadline):
                number = failed[0] if failed else states.index(None)
                how = f"ended with {states[number]}" if failed else f"not done after {limit:.0f} s"
                errors = running[number][1]
                errors.seek(0)
                raise RuntimeError(f"Process {number} {how}:\n{errors.read()[-3000:]}")
            if None not in states:
                return
            time.sleep(0.05)


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
