#!/usr/bin/env bash
# Provisions the kits anew and starts the server and the sites. They get a session of their own, so that Ctrl-C
# reaches the script alone and they are stopped in order.
set -euo pipefail
poc="$(cd "$(dirname "$0")" && pwd)"
"$poc/check.sh"
source "$poc/env.sh"
umask 077 # keys, records and the model are this user's alone
mkdir -p "$POC_FOLDER"
touch "$MARKER"
find "$POC_FOLDER" -mindepth 1 -maxdepth 1 ! -name .fedvlp-poc -exec rm -rf {} +
mkdir "$HOME"
sed "s/8002/$POC_PORT/g" "$poc/project.yml" >"$POC_FOLDER/project.yml"
nvflare poc prepare -i "$POC_FOLDER/project.yml" --force
setsid --wait nvflare poc start
