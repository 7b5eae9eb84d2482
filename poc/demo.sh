#!/usr/bin/env bash
# What `make demo` calls: the main job in FLARE's simulator, five sites side by side (-t 5), and its report; then, by the
# engine on the same terms, each site alone and FedAvg; then what the three reach. Arguments are settings of the job.
# All of it lies in build/demo, whatever FEDVLP_HOME says. A demo that was stopped goes on where it was.
set -euo pipefail
export FEDVLP_HOME= PYTHONUNBUFFERED=1
demo=build/demo
runs=$demo/runs
[ ! -e $demo/complete ] || rm -rf $demo
mkdir -p $runs

trap 'kill "${follower:-}" 2>/dev/null || true' EXIT
trap 'echo "stopped; resume with: make demo" >&2; exit 130' INT TERM

finished() { grep -qs '"status": "finished"' "$runs/$1/001/run_status.json"; }

# A line whenever FLARE's run has come further.
follow() {
    local now said=""
    while sleep 1; do
        now=$(sed -n 's/^ *"summary": "\(.*\)",*$/\1/p' $runs/feddra/001/run_status.json 2>/dev/null || true)
        [ "$now" = "$said" ] || echo "feddra: $now"
        said=$now
    done
}

if ! finished feddra; then
    [ -e $demo/jobs/feddra ] || fedvlp jobs export feddra $demo/jobs/feddra "$@" >$demo/export.log
    echo "FedDRA in FLARE's simulator, which takes a minute to begin; its log is $demo/flare.log"
    follow &
    follower=$!
    if ! (cd $demo && nvflare simulator jobs/feddra -t 5 -w workspace) >$demo/flare.log 2>&1; then
        echo "FLARE stopped: see $demo/flare.log; go on with: make demo" >&2
        exit 2
    fi
    kill $follower
fi
for method in local fedavg; do
    terms=("$method" --like $runs/feddra/001 --runs $runs)
    [ ! -e $runs/$method/001 ] || terms=(--resume $runs/$method/001)
    finished $method || fedvlp simulate "${terms[@]}" | tee $demo/$method.log | sed -un "s/^round/$method: round/p"
done
fedvlp report $runs/feddra/001
fedvlp compare $runs/local/001 $runs/fedavg/001 $runs/feddra/001
echo "local is each hospital alone; fedavg and feddra are all of them together, from the same start with as many steps."
touch $demo/complete
