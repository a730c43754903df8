"""`python -m tests.chaos` makes a plan, runs it and prints a verdict.

The exit code is 0 if all promises held, 1 if not, and 2 if the run proves nothing. A failed plan is kept in
`tests/chaos/failed/SEED.json`, and `--replay` repeats it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from tests.chaos.director import Director, say_to
from tests.chaos.figures import figures
from tests.chaos.gathering import gather
from tests.chaos.isolation import isolate
from tests.chaos.oracles import breaches
from tests.chaos.plan import Kind, Plan, make_plan
from tests.chaos.report import as_json, verdict, words

FAILED: Final = Path(__file__).with_name("failed")


def main(arguments: Sequence[str]) -> int:
    """Run one plan and return the exit code."""
    options = _options(arguments)
    if sys.platform != "linux":
        sys.exit("chaos needs Linux: it freezes processes and shifts the server's clock as Linux does")
    isolate(["-m", "tests.chaos", *arguments])
    plan = _plan(options)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    (folder / "plan.json").write_text(plan.to_json())
    say = say_to(sys.stderr)
    say(f"seed {plan.seed}: {len(plan.faults)} faults in {plan.seconds:g} s, planned in {folder}/plan.json")
    try:
        director = Director(plan, folder, source=options.source, say=say)
        try:
            timeline = director.run()
            evidence = gather(director, plan, timeline, folder)
        finally:
            director.close()
    except BaseException:
        print(f"Logs and files of the run: {folder}")
        raise
    (folder / "evidence.json").write_text(json.dumps(asdict(evidence), default=str))
    found = breaches(evidence)
    counted = figures(evidence, found)
    held, last = verdict(evidence, counted, found)
    report = as_json(evidence, counted, found, held=held)
    for path in (folder / "report.json", options.report):
        if path is not None:
            path.write_text(report)
    print("\n".join(words(evidence, counted, found)))
    if not held:
        options.failed.mkdir(exist_ok=True)
        kept = options.failed / f"{plan.seed}.json"
        kept.write_text(plan.to_json())
        print(f"The plan is kept; do it again with: python -m tests.chaos --replay {kept}")
    if held and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"Logs and files of the run: {folder}")
    print(last)
    return 0 if held else 1 if found else 2


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="decides the plan")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults are injected")
    parser.add_argument("--replay", type=Path, help="do this plan instead")
    parser.add_argument("--only", type=Kind, nargs="+", help="only these kinds of faults")
    parser.add_argument(
        "--nats", action="store_true", help="announce tasks by NATS, and inject faults of NATS, too"
    )
    parser.add_argument(
        "--basic", action="store_true", help="without the later kinds: the plan that the seed always had"
    )
    parser.add_argument("--report", type=Path, help="write the figures as JSON, too")
    parser.add_argument("--failed", type=Path, default=FAILED, help="where a plan that failed is kept")
    parser.add_argument("--source", type=Path, help="let workers run the everbeat in this folder")
    parser.add_argument("--keep", action="store_true", help="keep the run's files even if all held")
    return parser.parse_args(arguments)


def _plan(options: argparse.Namespace) -> Plan:
    if options.replay is not None:
        return Plan.from_json(options.replay.read_text())
    return make_plan(
        seed=options.seed,
        seconds=options.seconds,
        kinds=options.only,
        nats=options.nats,
        liveness=not (options.basic or options.nats),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
