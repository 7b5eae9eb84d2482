#!/usr/bin/env bash
# Refuses a folder that start.sh may not empty: one that no POC made, or whose POC runs.
set -euo pipefail
poc="$(cd "$(dirname "$0")" && pwd)"
source "$poc/env.sh"
if [ -e "$POC_FOLDER" ] && [ ! -e "$MARKER" ] && [ -n "$(ls -A "$POC_FOLDER")" ]; then
    echo "$POC_FOLDER is not empty and has no .fedvlp-poc, so it may not be a POC's; nothing is removed." \
        "Set POC_FOLDER to a new folder, or remove this one yourself" >&2
    exit 2
fi
processes="$(running)"
if [ -n "$processes" ]; then
    echo "a POC runs in $POC_FOLDER; stop it with poc/stop.sh, or set POC_FOLDER and POC_PORT to others" >&2
    exit 2
fi
