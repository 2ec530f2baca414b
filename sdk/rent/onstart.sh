#!/bin/bash
# Starts a p2pserve node on a rented box, and starts it again when it ends by a failure. vast.ai and RunPod run this
# whenever the box boots. What it is told, as variables of the instance:
#
#   P2PSERVE_BOOTSTRAP      a worker's join token, for this box alone: `p2pserve token create --uses 1 --expires 1d`
#   P2PSERVE_JOIN_...       options of `p2pserve join`, like P2PSERVE_JOIN_MODEL and P2PSERVE_JOIN_USD_PER_HOUR
#   P2PSERVE_PORT           the one TCP port that the instance maps (default: 4001)
#   P2PSERVE_HOME           identity, keys, logs (default: p2pserve in /workspace, or in $HOME)
#   P2PSERVE_SOURCE         what pip installs where the image has no p2pserve: a wheel's address, or git+https://...
#   P2PSERVE_DRY_RUN=1      say what would be run, and end
set -uo pipefail

say() { echo "p2pserve-onstart: $*" >&2; }

if [[ -z "${P2PSERVE_BOOTSTRAP:-}" ]]; then
    say "P2PSERVE_BOOTSTRAP is not set: give the instance a join token of its own"
    exit 2
fi
port="${P2PSERVE_PORT:-4001}"
if [[ ! "$port" =~ ^[0-9]+$ ]] || ((port < 1 || port > 65535)); then
    say "P2PSERVE_PORT is '$port'; it is a number from 1 to 65535"
    exit 2
fi

# Disks that outlive a stop: with the same identity the box is the same node, and weights are not fetched again.
root="$HOME"
[[ -d /workspace && -w /workspace ]] && root=/workspace
export P2PSERVE_HOME="${P2PSERVE_HOME:-$root/p2pserve}" HF_HOME="${HF_HOME:-$root/huggingface}"

# A shell by SSH does not see the instance's variables. It gets those that say where the box is, and not the token.
if [[ "${P2PSERVE_DRY_RUN:-}" != 1 && -w /etc/environment ]]; then
    env | grep -E '^(VAST_TCP_PORT_[0-9]+|PUBLIC_IPADDR|CONTAINER_ID|GPU_COUNT|RUNPOD_(POD_ID|DC_ID|PUBLIC_IP|TCP_PORT_[0-9]+)|P2PSERVE_HOME|HF_HOME)=' \
        | while IFS= read -r line; do grep -qxF -- "$line" /etc/environment || echo "$line"; done >>/etc/environment
fi

program="$(command -v p2pserve || true)"
[[ -z "$program" && -x /opt/p2pserve/.venv/bin/p2pserve ]] && program=/opt/p2pserve/.venv/bin/p2pserve
if [[ -z "$program" ]]; then
    program="$root/p2pserve-venv/bin/p2pserve"
    if [[ ! -x "$program" ]]; then
        if [[ -z "${P2PSERVE_SOURCE:-}" ]]; then
            say "this image has no p2pserve: use the one of p2pserve's Dockerfile, or set P2PSERVE_SOURCE"
            exit 2
        fi
        say "installing $P2PSERVE_SOURCE"
        if [[ "${P2PSERVE_DRY_RUN:-}" != 1 ]]; then
            python3 -m venv "$root/p2pserve-venv" \
                && "$root/p2pserve-venv/bin/pip" install --quiet "p2pserve[gpu] @ $P2PSERVE_SOURCE" || exit 1
        fi
    fi
fi

if [[ "${P2PSERVE_DRY_RUN:-}" == 1 ]]; then
    say "would run: $program join --port $port"
    exit 0
fi

wait_s=5
while true; do
    started=$SECONDS
    "$program" join --port "$port"
    code=$?
    case $code in
        0 | 130) say "the node has left"; exit 0 ;;
        2 | 4) say "the node cannot start like this (exit code $code): see the line above"; exit "$code" ;;
    esac
    ((SECONDS - started > 600)) && wait_s=5
    say "the node ended with exit code $code; again in $wait_s s"
    sleep "$wait_s"
    wait_s=$((wait_s < 300 ? wait_s * 2 : 300))
done
