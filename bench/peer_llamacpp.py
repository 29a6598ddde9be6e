"""llama.cpp's own HTTP server, from the same wheel and so the same kernels as our runner: the peer.

Run as `python -m bench.peer_llamacpp --model FILE --port N --slots N --threads N --context N`; it prints one
line when it listens and ends when standard input closes.
"""

from __future__ import annotations

import argparse
import sys

import xllamacpp


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    for name in ("port", "slots", "threads", "context"):
        parser.add_argument(f"--{name}", type=int, required=True)
    a = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = a.model
    params.hostnames = ["127.0.0.1"]
    params.port = a.port
    params.n_parallel = a.slots
    params.n_ctx = a.context
    params.kv_unified = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = a.threads
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
