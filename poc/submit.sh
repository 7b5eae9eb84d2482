#!/usr/bin/env bash
# Exports a job (default: a smaller jobs/feddra for three sites), submits it, follows it, fetches what it made.
#   poc/submit.sh                                       the default
#   poc/submit.sh fedavg --sites 3 --set rounds.rounds=2    what `fedvlp jobs export` takes
set -euo pipefail
poc="$(cd "$(dirname "$0")" && pwd)"
source "$poc/env.sh"
[ $# -gt 0 ] || set -- feddra --sites 3 --set data.size=1200 --set rounds.rounds=4
fedvlp jobs export "$1" "$POC_FOLDER/job" "${@:2}"
python3 - "$POC_FOLDER/job" "$(dirname "$NVFLARE_STARTUP_KIT_DIR")" <<'PY'
import json, sys
from pathlib import Path
places = json.loads(Path(sys.argv[1], "meta.json").read_text())["deploy_map"].values()
missing = sorted({site for sites in places for site in sites} - {"server"} - {kit.name for kit in Path(sys.argv[2]).iterdir()})
if missing:
    print(f"the job is of sites that this POC lacks ({', '.join(missing)}), so it would wait for ever; export it with "
          "--sites 3, or add them to poc/project.yml", file=sys.stderr)
    sys.exit(2)
PY
id="$(nvflare --format json job submit -j "$POC_FOLDER/job" | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"]["job_id"])')"
echo "job $id"
python3 "$poc/watch.py" "$NVFLARE_STARTUP_KIT_DIR" "$id"
nvflare job download "$id" -o "$POC_FOLDER/result" >/dev/null
run="$(realpath --relative-to . "$POC_FOLDER/result/$id/workspace/fedvlp")"
fedvlp report "$run"
echo "model $run/model/model.safetensors"
