# Sourced by the other scripts. All that the POC writes lies in one folder; FLARE's own notes (~/.nvflare) too. Towers
# are read where `fedvlp towers fetch` put them, and runs stay in the kits.
POC_FOLDER="$(realpath -m "${POC_FOLDER:-build/poc}")"
POC_PORT="${POC_PORT:-8002}"
export FEDVLP_TOWERS="$(realpath -m "${FEDVLP_TOWERS:-$HOME/.cache/fedvlp/towers}")"
unset FEDVLP_HOME
export NVFLARE_POC_WORKSPACE="$POC_FOLDER/workspace"
export HOME="$POC_FOLDER/home"
export NVFLARE_STARTUP_KIT_DIR="$NVFLARE_POC_WORKSPACE/fedvlp/prod_00/lead@localhost.org"
SERVER="$NVFLARE_POC_WORKSPACE/fedvlp/prod_00/localhost"
MARKER="$POC_FOLDER/.fedvlp-poc" # a folder that has it is the POC's own, which start.sh empties

# The processes of the POC, one a line: id and command.
running() {
    python3 "$poc/running.py" "$NVFLARE_POC_WORKSPACE" && return
    echo "the POC's processes cannot be listed; put .venv/bin on the path" >&2
    return 1
}
