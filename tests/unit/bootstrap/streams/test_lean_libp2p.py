"""libp2p is imported without what nobody here uses, says so where that is used, and leaves others' imports alone."""

import subprocess
import sys

PROGRAM = """
import sys
import p2pserve.bootstrap.streams.libp2p_host
from p2pserve.bootstrap.streams.lean_libp2p import UNUSED

print(sorted(name for name in sys.modules if name in UNUSED))
import libp2p
try:
    libp2p.QUICTransport()
except ImportError as error:
    print(error)
from multiaddr.resolvers import DNSResolver
resolver = DNSResolver()
try:
    resolver._resolver.resolve
except ImportError as error:
    print(error)
import requests
import libp2p.relay
print(requests.get.__name__, libp2p.relay.__file__ is not None)
"""


def test_libp2p_comes_without_what_is_not_used() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [
        "[]",
        "p2pserve imports libp2p without libp2p.transport.quic.transport; QUICTransport is not there",
        "p2pserve imports libp2p without dns.asyncresolver; Resolver is not there",
        "get True",
    ]
