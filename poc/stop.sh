#!/usr/bin/env bash
# Stops the server and the sites, running jobs first, and makes sure that nothing is left.
set -uo pipefail
trap '' INT TERM
poc="$(cd "$(dirname "$0")" && pwd)"
source "$poc/env.sh"
left="$(running)" || exit 1
[ -n "$left" ] || { echo "nothing of the POC is running"; exit 0; }
timeout 60 nvflare poc stop
for _ in $(seq 20); do
    left="$(running)" || exit 1
    [ -n "$left" ] || { echo "stopped, no process left"; exit 0; }
    sleep 1
done
left="$(running)" || exit 1
printf 'these did not stop and are killed:\n%s\n' "$left" >&2
cut -d ' ' -f 1 <<<"$left" | xargs -r kill -9
