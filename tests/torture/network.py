"""Hosts without machines: network namespaces with an address and a bandwidth each, joined by a bridge in one of their own.

Nothing leads out of them, and they end with their keepers, which end with this process.
"""

import contextlib
import ctypes
import os
import subprocess

LIBC = ctypes.CDLL(None, use_errno=True)
KEEP = "ip link set lo up && echo up && read -r _"


class Network:
    """Namespaces of hosts, by their number."""

    def __init__(self, hosts, bandwidth):
        self.switch = hosts
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.keepers = [subprocess.Popen(["unshare", "--net", "sh", "-c", KEEP], text=True, **pipes) for _ in range(hosts + 1)]
        if any(keeper.stdout.readline() != "up\n" for keeper in self.keepers):
            raise PermissionError("network namespaces cannot be made here")
        self.do(self.switch, "ip link add name bridge type bridge", "ip link set bridge up")
        for host in range(hosts):
            peer = f"peer name eth0 netns {self.keepers[host].pid}"
            self.do(self.switch, f"ip link add name host{host} type veth {peer}", f"ip link set host{host} master bridge up")
            self.do(host, f"ip address add {address(host)}/24 dev eth0", "ip link set eth0 up")
            # What a killed process has not sent is lost within a second, as with its host.
            self.do(host, "sysctl -qw net.ipv4.tcp_orphan_retries=1")
            self.limit(host, bandwidth)

    def do(self, host, *commands):
        """Runs commands in a namespace."""
        for command in commands:
            subprocess.run(["nsenter", f"--net=/proc/{self.keepers[host].pid}/ns/net", *command.split()], check=True)

    def limit(self, host, bandwidth):
        """Bounds what a host sends."""
        self.do(host, f"tc qdisc replace dev eth0 root tbf rate {bandwidth} burst 64kb latency 100ms")

    def connect(self, host, is_connected):
        """Passes the packets of a host on, or loses them in both directions: no side notices."""
        self.do(self.switch, f"bridge link set dev host{host} state {3 if is_connected else 0}")

    @contextlib.contextmanager
    def inside(self, host):
        """Sockets that this thread opens meanwhile, and processes that it starts, are of a host."""
        with open("/proc/thread-self/ns/net") as before, open(f"/proc/{self.keepers[host].pid}/ns/net") as there:
            enter(there)
            try:
                yield
            finally:
                enter(before)

    def close(self):
        """Ends all of it."""
        for keeper in self.keepers:
            keeper.communicate()


def enter(namespace):
    """Moves this thread into a network namespace, which is an open file."""
    if LIBC.setns(namespace.fileno(), 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def address(host):
    """The address of a host."""
    return f"10.77.0.{host + 1}"
