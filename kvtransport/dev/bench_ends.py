"""The two processes that `bench` measures: sender and receiver. Commands and answers are JSON
lines."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from ..errors import TransferError
from ..link.endpoint import Endpoint
from ..link.receive_link import ReceiveLink
from ..link.send_link import SendLink
from ..link.settings import LinkSettings
from ..wire.dial_path import DialPath
from ..wire.frames import KVFrame
from ..wire.sockets import hang_up, pace, read_link_hello
from ..wire.tickets import LinkTicket, TransferTicket

_BUFFER_BYTES = 1 << 20
_FRAME_BYTES = 4 << 20
_WINDOW_BYTES = 64 << 20
_TIMEOUT_S = 60.0

_TOKENS, _HEADS, _HEAD_DIM = 1536, 8, 128
LAYER_BYTES = 2 * 2 * _TOKENS * _HEADS * _HEAD_DIM
"""K and V of a layer as the benchmark moves it, in bf16."""


@dataclass(slots=True)
class _End:
    """What a process keeps between commands."""

    address: tuple[str, int] = ("127.0.0.1", 0)
    link_address: tuple[str, int] = ("127.0.0.1", 0)
    links: dict[int, Any] = field(default_factory=dict)
    endpoint: Endpoint = field(default_factory=lambda: Endpoint(settings=LinkSettings(limit_bytes=_WINDOW_BYTES)))
    payloads: list[bytes] = field(default_factory=list)
    layers: list[tuple[Any, Any]] = field(default_factory=list)
    transfers: int = 0


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _timed(work: Callable[[], None]) -> dict[str, float]:
    cpu, began = _cpu(), time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - began, "cpu_s": _cpu() - cpu}


def _link_ticket(number: int) -> LinkTicket:
    """Both processes are ours: the ticket needs no secret."""
    return LinkTicket(number.to_bytes(16, "big"), bytes(32), 3600.0)


def _transfer_ticket(end: _End, link: bytes, codec: str) -> TransferTicket:
    end.transfers += 1
    return TransferTicket(end.transfers.to_bytes(16, "big"), link, codec, _TIMEOUT_S)


# ---- sending ----------------------------------------------------------------------------------------------------


def _send_plain(end: _End, command: dict[str, Any]) -> dict[str, float]:
    """Plain or TLS sockets, buffers of 4 MiB; done when the other side has said that it has all."""
    sock: socket.socket = socket.create_connection(end.address)
    if command.get("pace"):
        pace(sock, command["pace"])
    if command["op"] == "tls":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        sock = context.wrap_socket(sock)

    def work() -> None:
        for number in range(command["bytes"] // _FRAME_BYTES):
            sock.sendall(end.payloads[number % len(end.payloads)])
        sock.recv(1)

    with sock:
        return _timed(work)


def _send_link(end: _End, command: dict[str, Any]) -> dict[str, float]:
    """Over a warm link: opaque payloads of 4 MiB, or KV that is quantised first."""
    number, streams, pace = command["link"], command["streams"], command.get("pace", 0)
    link: SendLink | None = end.links.get(number)
    if link is None:
        path = DialPath(*end.link_address, streams=streams, pace_bytes_s=pace)
        link = end.links[number] = end.endpoint.open_sender(_link_ticket(number), [path])
        if not link.wait_connected(streams, 5.0):
            raise RuntimeError(f"no connection: {link.statistics().failures}")
    outgoing = link.open(_transfer_ticket(end, link.ticket.link, command["codec"]))
    frames = _kv_frames if command["op"] == "kv" else _opaque_frames

    def work() -> None:
        for frame in frames(end, command):
            outgoing.send(frame, timeout=_TIMEOUT_S)
        outgoing.finish(1)
        state = outgoing.wait(_TIMEOUT_S)
        if state.name != "delivered":
            raise RuntimeError(f"the transfer {state}")

    return _timed(work)


def _opaque_frames(end: _End, command: dict[str, Any]) -> Any:
    for number in range(command["bytes"] // _FRAME_BYTES):
        yield KVFrame(number, 0, 1, 0, 1, 0, 0, 64, end.payloads[number % len(end.payloads)])


def _kv_frames(end: _End, command: dict[str, Any]) -> Any:
    from ...kernels.codec import encode, wire_dtype
    from ...kernels.codecs import codec_named

    codec = codec_named(command["codec"])
    for layer in range(command["bytes"] // LAYER_BYTES):
        k, v = end.layers[layer % len(end.layers)]
        payload = encode(codec, k, v, start=0, layer=layer)
        dtype = wire_dtype(k.dtype).wire
        yield KVFrame(layer, 0, _HEADS, 0, _TOKENS, codec.wire, dtype, _HEAD_DIM, payload)


# ---- receiving --------------------------------------------------------------------------------------------------


def _receive_plain(listener: socket.socket, command: dict[str, Any], context: ssl.SSLContext) -> dict[str, float]:
    sock, _ = listener.accept()
    if command["op"] == "tls":
        sock = context.wrap_socket(sock, server_side=True)
    buffer = bytearray(_BUFFER_BYTES)
    left = command["bytes"] // _FRAME_BYTES * _FRAME_BYTES

    def work() -> None:
        nonlocal left
        while left:
            count = sock.recv_into(buffer, min(left, len(buffer)))
            if not count:
                raise RuntimeError("the sender hung up")
            left -= count
        sock.sendall(b"\0")

    with sock:
        return _timed(work)


def _receive_link(end: _End, command: dict[str, Any]) -> dict[str, float]:
    number = command["link"]
    link: ReceiveLink | None = end.links.get(number)
    if link is None:
        link = end.links[number] = end.endpoint.open_receiver(_link_ticket(number))
    incoming = link.expect(_transfer_ticket(end, link.ticket.link, command["codec"]))

    def work() -> None:
        incoming.grant(_WINDOW_BYTES)
        for frame in incoming:
            if command["op"] == "kv":
                _decode(frame)
        incoming.acknowledge()

    return _timed(work)


def _accept_links(end: _End, listener: socket.socket) -> None:
    """Give every connection, also redialled ones, to its link until the listener is closed."""
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        try:
            end.endpoint.attach(read_link_hello(sock, 5.0), sock)
        except TransferError:
            sock.close()


def _decode(frame: KVFrame) -> None:
    from ...kernels.codec import decode, torch_dtype
    from ...kernels.codecs import codec_from_wire
    from ...kernels.format import dtype_from_wire

    decode(
        codec_from_wire(frame.codec),
        frame.payload,
        tokens=frame.tokens,
        heads=frame.heads,
        head_dim=frame.head_dim,
        dtype=torch_dtype(dtype_from_wire(frame.dtype)),
        start=frame.start,
        layer=frame.layer,
    )


# ---- both -------------------------------------------------------------------------------------------------------


def _prepare_kv(end: _End) -> None:
    """Tensors to send, and the codec warm in both directions, as in a running engine."""
    import torch

    from ...kernels.codec import encode

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    shape = (_TOKENS, _HEADS, _HEAD_DIM)
    end.layers = [
        (
            torch.randn(shape, generator=generator).to(torch.bfloat16),
            torch.randn(shape, generator=generator).to(torch.bfloat16),
        )
        for _ in range(4)
    ]
    for _ in range(3):
        k, v = end.layers[0]
        payload = encode("kv4", k, v, start=0, layer=0)
        _decode(KVFrame(0, 0, _HEADS, 0, _TOKENS, 1, 0, _HEAD_DIM, payload))


def _server_context() -> ssl.SSLContext:
    """A self-made certificate: what the benchmark compares is the cost of the records."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    certificate = builder.sign(key, hashes.SHA256())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:
        both = FilePath(folder) / "both.pem"
        pem = serialization.Encoding.PEM
        plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        both.write_bytes(key.private_bytes(pem, *plain) + certificate.public_bytes(pem))
        context.load_cert_chain(both)
    return context


def _serve(role: str) -> None:
    end = _End()
    listener, links = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    acceptor = threading.Thread(target=_accept_links, args=(end, links))
    acceptor.start()
    context = _server_context()
    _say({"port": listener.getsockname()[1], "link_port": links.getsockname()[1]})
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "prepare":
            end.address = ("127.0.0.1", command["port"])
            end.link_address = ("127.0.0.1", command["link_port"])
            end.payloads = [os.urandom(_FRAME_BYTES) for _ in range(8)]
            if command["kv"]:
                _prepare_kv(end)
            _say({})
        elif command["op"] in ("raw", "tls"):
            sends = role == "send"
            _say(_send_plain(end, command) if sends else _receive_plain(listener, command, context))
        else:
            _say(_send_link(end, command) if role == "send" else _receive_link(end, command))
    hang_up(links)
    acceptor.join()
    end.endpoint.close()
    for each in (listener, links):
        each.close()


def _say(answer: dict[str, float]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Serve commands until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m p2pserve.kvtransport.dev.bench_ends", description=__doc__)
    parser.add_argument("role", choices=("send", "receive"))
    _serve(parser.parse_args().role)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
