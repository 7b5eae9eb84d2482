#!/usr/bin/env bash
# From nothing to a trained model and back to no processes, whatever happens on the way: what `make poc` calls.
set -euo pipefail
poc="$(cd "$(dirname "$0")" && pwd)"
"$poc/check.sh" # before the trap: another's POC is not stopped
trap '"$poc/stop.sh"' EXIT
trap 'exit 130' INT TERM
"$poc/start.sh"
"$poc/submit.sh" "$@"
