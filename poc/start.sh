#!/usr/bin/env bash
# Provisions the kits anew and starts the server and the sites. They get a session of their own, so that Ctrl-C
# reaches the script alone and they are stopped in order.
set -euo pipefail
poc="$(cd "$(dirname "$0")" && pwd)"
source "$poc/env.sh"
umask 077 # keys, records and the model are this user's alone
rm -rf "$POC_FOLDER"
mkdir -p "$HOME"
sed "s/8002/$POC_PORT/g" "$poc/project.yml" >"$POC_FOLDER/project.yml"
nvflare poc prepare -i "$POC_FOLDER/project.yml" --force
setsid --wait nvflare poc start
