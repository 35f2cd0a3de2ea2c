"""Two nodes with a slow link between them on this machine: a network namespace each. Nothing in them has to be told
which interface to take, although their own names are of loopback, as on many machines."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ADDRESSES = ("10.213.7.1", "10.213.7.2")
_HOSTS = Path("/etc/netns")
"""Folder of the files that `ip netns exec` mounts over those of /etc."""


@contextmanager
def two_namespaces(mbit_s: int) -> Iterator[list[list[str]]]:
    """Returns for each node the words before a command that run it there. OSError or CalledProcessError if this machine
    has no namespaces for us."""
    names = [f"overlap_{os.getpid()}_{node}" for node in range(2)]
    try:
        for node, name in enumerate(names):
            _run("ip", "netns", "add", name)
            (_HOSTS / name).mkdir(parents=True)
            (_HOSTS / name / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 node{node}\n")
        link = f"ip link add wire type veth peer name wire netns {names[1]}"
        _run(*_within(names[0]), *link.split())
        for name, address in zip(names, ADDRESSES, strict=True):
            _run(*_within(name), *f"ip address add {address}/24 dev wire".split())
            for interface in ("lo", "wire"):
                _run(*_within(name), *f"ip link set {interface} up".split())
            limit = f"tc qdisc add dev wire root tbf rate {mbit_s}mbit burst 64kb latency 400ms"
            _run(*_within(name), *limit.split())
        hostname = ["unshare", "--uts", "sh", "-c", 'hostname "$1"; shift; exec "$@"', "sh"]
        yield [[*_within(name), *hostname, f"node{node}"] for node, name in enumerate(names)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(_HOSTS / name, ignore_errors=True)


def why_not() -> str | None:
    """Returns why there can be no namespaces here; None if there can."""
    try:
        with two_namespaces(1000) as nodes:
            for node in nodes:
                _run(*node, "true")
    except subprocess.CalledProcessError as error:
        return f"{error.cmd[0]}: {error.stderr.strip()}"
    except OSError as error:
        return str(error)
    return None


def _within(name: str) -> list[str]:
    return ["ip", "netns", "exec", name]


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
