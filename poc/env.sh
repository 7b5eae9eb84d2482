# Sourced by the other scripts. All that the POC writes lies in one folder; FLARE's own notes (~/.nvflare) too.
POC_FOLDER="$(realpath -m "${POC_FOLDER:-build/poc}")"
POC_PORT="${POC_PORT:-8002}"
export NVFLARE_POC_WORKSPACE="$POC_FOLDER/workspace"
export HOME="$POC_FOLDER/home"
export NVFLARE_STARTUP_KIT_DIR="$NVFLARE_POC_WORKSPACE/fedvlp/prod_00/lead@localhost.org"
SERVER="$NVFLARE_POC_WORKSPACE/fedvlp/prod_00/localhost"
