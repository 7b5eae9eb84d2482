#!/usr/bin/env bash
# Stops the server and the sites, running jobs first, and makes sure that nothing is left.
set -uo pipefail
trap '' INT TERM
poc="$(cd "$(dirname "$0")" && pwd)"
source "$poc/env.sh"
left() { pgrep -f -- "$NVFLARE_POC_WORKSPACE/"; } # every process of the POC has the workspace on its command line
left >/dev/null || { echo "nothing of the POC is running"; exit 0; }
timeout 60 nvflare poc stop
for _ in $(seq 20); do left >/dev/null || { echo "stopped, no process left"; exit 0; }; sleep 1; done
echo "these did not stop and are killed:" >&2
left | xargs -r ps -o pid,args -p >&2
left | xargs -r kill -9
