"""Nodes A, B and C and the service on a network of their own, whose links are cut while they work.

Run it in a network namespace of its own: ``unshare --net python three_machines.py DIRECTORY MODEL TOKENS CUTS KBIT SEED``.
A deposits, B grafts, C queries, each as processes on its own address, through two replicas of the
service. Prints what was seen as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from beside import beside
from fleet import PROJECT, as_json, team
from graft_process import command_of
from servers import s3_server

HUB = "10.77.0.1"

# More than a connection's beginning and a short answer.
_TRANSFER = 8 * 1024


class Node:
    """A machine: a namespace with one link to the service's, slow enough for transfers to be cut.

    Parameters
    ----------
    lost
        A file that is told of every request that broke and was sent again.
    """

    def __init__(self, letter: str, number: int, kbit: int, lost: Path) -> None:
        self.letter = letter
        self.lost = lost
        self.runs = 0
        self.is_working = False
        self.namespace = f"kvgraft-{os.getpid()}-{letter.lower()}"
        self._link = f"to-{letter.lower()}"
        _ip("netns", "add", self.namespace)
        _ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        _ip("link", "set", self._link, "master", "hub", "up")
        _ip("-n", self.namespace, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", self.namespace, "link", "set", device, "up")
        shaped = ("root", "tbf", "rate", f"{kbit}kbit", "burst", "32kb", "latency", "100ms")
        _run("tc", "qdisc", "add", "dev", self._link, *shaped)
        _run("ip", "netns", "exec", self.namespace, "tc", "qdisc", "add", "dev", "eth0", *shaped)

    def run(self, *arguments: str) -> Any:
        """The JSON that Python says on this node."""
        environment = {**os.environ, "PYTHONPATH": str(PROJECT), "HF_HUB_OFFLINE": "1"}
        # A node knows the service only.
        for name in [name for name in environment if name.startswith(("AWS_", "KVGRAFT_"))]:
            del environment[name]
        command = [sys.executable, str(Path(__file__).with_name("retries.py")), str(self.lost), *arguments]
        self.runs += 1
        self.is_working = True
        try:
            done = subprocess.run(
                ["ip", "netns", "exec", self.namespace, *command],
                env=environment, check=False, capture_output=True, text=True,
            )  # fmt: skip
        finally:
            self.is_working = False
        assert done.returncode == 0, f"{self.letter}: {command}: {done.stderr[-2000:]}"
        return as_json(done.stdout)

    def carried(self) -> int:
        """Bytes that have passed the link, both ways."""
        [link] = json.loads(_run("ip", "-json", "-statistics", "link", "show", "dev", self._link))
        return int(link["stats64"]["rx"]["bytes"] + link["stats64"]["tx"]["bytes"])

    def is_carrying(self, wait_s: float) -> bool:
        """Whether the command that runs now moves more than a handshake within a time."""
        run, before, end = self.runs, self.carried(), time.monotonic() + wait_s
        while self.is_working and self.runs == run and time.monotonic() < end:
            time.sleep(0.02)
            if self.carried() - before > _TRANSFER:
                return True
        return False

    def cut(self, seconds: float, *, reset: bool) -> int:
        """Take the link away for a while; with ``reset`` its connections break. Returns how many did."""
        broken = 0
        if reset:
            said = _run("ip", "netns", "exec", self.namespace, "ss", "-KHtn", "state", "established", "dst", HUB)
            broken = len(said.splitlines())
        _ip("link", "set", self._link, "down")
        time.sleep(seconds)
        _ip("link", "set", self._link, "up")
        return broken

    def remove(self) -> None:
        _ip("netns", "del", self.namespace)


@dataclass
class Cuts:
    """What was cut so far: links of nodes that worked, in a transfer or not, and connections that broke with them."""

    made: int = 0
    in_transfer: int = 0
    connections: int = 0


@contextmanager
def cutting(nodes: list[Node], rng: random.Random) -> Iterator[Cuts]:
    """Cut the link of the node that works, at random until the block ends; every second cut waits for a transfer.

    Connections break in one of four cuts: were it more often, no chunk would pass between two of them, and a client
    gives up after as many attempts as it has.

    A cut is one in a transfer if bytes moved just before it, and did again after it, in one command.
    """
    cuts = Cuts()

    def cut(stop: threading.Event) -> None:
        while not stop.wait(rng.uniform(0.2, 2.0)):
            node = next((node for node in nodes if node.is_working), None)
            if node is None:
                continue
            run = node.runs
            was_carrying = node.is_carrying(30.0 if cuts.made % 2 else 0.1)
            if not node.is_working:
                continue
            cuts.connections += node.cut(rng.uniform(0.1, 1.0), reset=rng.random() < 0.25)
            cuts.made += 1
            cuts.in_transfer += was_carrying and node.runs == run and node.is_carrying(5.0)

    with beside(cut):
        yield cuts


def main() -> None:
    directory, model, count, cuts_wanted, kbit, seed = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
    rng = random.Random(seed)
    _ip("link", "set", "lo", "up")
    _ip("link", "add", "hub", "type", "bridge")
    _ip("addr", "add", f"{HUB}/24", "dev", "hub")
    _ip("link", "set", "hub", "up")
    lost = directory / "lost"
    lost.touch()
    with ExitStack() as stack:
        nodes = []
        for number, letter in enumerate("ABC", start=11):
            nodes.append(Node(letter, number, kbit, lost))
            stack.callback(nodes[-1].remove)
        a, b, c = nodes
        s3 = stack.enter_context(s3_server())
        served = stack.enter_context(team(directory, s3, 2, host=HUB, insecure_any_host=True))
        urls = [replica.url for replica in served.replicas]

        def is_enough(cuts: Cuts) -> bool:
            return cuts.made >= cuts_wanted and cuts.in_transfer >= cuts_wanted // 4 and lost.stat().st_size > 0

        with cutting(nodes, rng) as cuts:
            tokens = [rng.randrange(count) for _ in range(count)]
            deposited = a.run(*command_of(urls[0], model, "deposit", tokens)[1:])
            assert "artifact" in deposited, deposited
            artifact = deposited["artifact"]
            grafted = b.run(*command_of(urls[1], model, "graft", tokens)[1:])
            found = c.run(*_kvgraft("query", "--tag", "stored", "--json", "--repo", urls[0]))
            trees: dict[str, list[str]] = {}
            pulls = 0
            # In as many as it takes, but not for ever: a kernel may not break connections.
            while pulls < len(nodes) or (pulls < 20 * len(nodes) and not is_enough(cuts)):
                node = nodes[pulls % len(nodes)]
                place = directory / f"pulled-{pulls}"
                node.run(*_kvgraft("pull", artifact, "--from", urls[pulls % 2], "--to", f"file://{place}", "--json"))
                trees.setdefault(node.letter, []).append(_digest(place))
                pulls += 1
        seen = {
            "artifact": artifact,
            "queried": [item["id"] for item in found["items"]],
            "logits": [deposited["sha256"], grafted["sha256"]],
            "grafted": grafted["grafted"],
            "trees": trees,
            "mib": round(sum(path.stat().st_size for path in (directory / "pulled-0/chunks").rglob("*")) / 2**20, 2),
            "cuts": cuts.made,
            "in_transfer": cuts.in_transfer,
            "connections": cuts.connections,
            "lost": lost.read_text().splitlines(),
            "tracebacks": [line for replica in served.replicas for line in replica.failures()],
        }
    print(json.dumps(seen))


def _kvgraft(*arguments: str) -> list[str]:
    return ["-m", "repo_service.cli", *arguments]


def _digest(place: Path) -> str:
    """SHA-256 of everything that belongs to artifacts in a repository, by name and bytes."""
    hasher = hashlib.sha256()
    for kind in ("artifacts", "blocks", "chunks"):
        for path in sorted((place / kind).rglob("*")):
            if path.is_file():
                data = path.read_bytes()
                hasher.update(f"{path.relative_to(place)} {len(data)} ".encode() + data)
    return hasher.hexdigest()


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
