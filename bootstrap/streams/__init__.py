"""Control streams between peers: libp2p, its in-memory twin, multiplexing, frames."""
