"""libp2p starts without fastecdsa, and says what is missing when somebody wants a NIST curve."""

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["fastecdsa"] = None  # as if it were not installed
del sys.modules["fastecdsa"]
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "fastecdsa" else find(name, package)
import p2pserve.bootstrap.streams.libp2p_host
from libp2p.crypto import ecc
for use in (lambda: ecc.create_new_key_pair("P-256"), lambda: ecc.ECCPublicKey.from_bytes(b"x", "P-256")):
    try:
        use()
    except ImportError as error:
        print(error)
"""


def test_without_fastecdsa_libp2p_works_and_nist_keys_are_refused() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    line = "keys on NIST curves need the package fastecdsa; p2pserve's own keys are Ed25519\n"
    assert ran.stdout == line * 2
