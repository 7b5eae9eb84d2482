"""Watches a job to its end: a line per phase with every site's loss and recall. Exit code 0 if the job completed.

It asks every two seconds, so a shorter phase may go unseen; the run's metrics.csv has them all.

python poc/watch.py ADMIN_KIT JOB_ID
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.api_spec import JobNotFound, JobNotRunning
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from fedvlp.flare.job_status import judge

COMPLETED = "FINISHED:COMPLETED"


def line(progress: dict[str, Any]) -> str:
    """One phase: where the run is, and a site's figures side by side."""
    figures = (
        f"{site} " + " ".join(f"{name} {told[name]:.2f}" for name in ("loss", "val_r1") if name in told)
        for site, told in sorted(progress["sites"].items())
    )
    return f"round {progress['round']}/{progress['num_rounds']} {progress['phase']:<9} " + "  |  ".join(figures)


def follow(session: Session, job_id: str, meta: dict[str, Any], seen: dict[str, str]) -> bool:
    """Called at every poll; prints what is new and asks to go on."""
    if meta["status"] != seen.get("status"):
        seen["status"] = meta["status"]
        print(f"status {meta['status']}", flush=True)
    if meta["status"] == "RUNNING":
        try:
            progress = (session.show_stats(job_id, "server") or {}).get("server", {}).get("progress", {})
        except (JobNotFound, JobNotRunning):  # it ended between the two questions
            return True
        if progress.get("phases_done") and line(progress) != seen.get("line"):
            seen["line"] = line(progress)
            print(seen["line"], flush=True)
    return True


def main(kit: Path, job_id: str) -> int:
    session = new_secure_session(kit.name, str(kit), timeout=30)
    try:
        _, meta = session.monitor_job_and_return_job_meta(job_id, 0, 2, follow, {})
        if meta["status"] != COMPLETED:
            print(judge(session, job_id).finding, file=sys.stderr)
    finally:
        session.close()
    return 0 if meta["status"] == COMPLETED else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
