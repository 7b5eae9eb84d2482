#!/usr/bin/env bash
# Refuses a folder that start.sh may not empty: one that no POC made, or whose POC runs. And a folder or a port that
# FLARE would only fail with a minute later, without saying why.
set -euo pipefail
poc="$(cd "$(dirname "$0")" && pwd)"
source "$poc/env.sh"
if [[ ! "$POC_FOLDER" =~ ^[A-Za-z0-9._/+=,-]+$ ]]; then
    echo "POC_FOLDER ${POC_FOLDER@Q}: the start scripts of FLARE take letters, digits and . _ + = , - / alone; set" \
        "POC_FOLDER to a folder of such a name" >&2
    exit 2
fi
if [[ ! "$POC_PORT" =~ ^[0-9]{4,5}$ ]] || ((POC_PORT < 1024 || POC_PORT > 65535)); then
    echo "POC_PORT ${POC_PORT@Q}: expected a number from 1024 to 65535" >&2
    exit 2
fi
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
python3 - "$POC_PORT" <<'PY'
import socket, sys
with socket.socket() as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", int(sys.argv[1])))
    except OSError as error:
        print(f"port {sys.argv[1]} cannot be opened ({error.strerror}): another program has it; set POC_PORT to "
              "another", file=sys.stderr)
        sys.exit(2)
PY
