"""The program of a tree that ends with the command that started it: `python -m everbeat.cli.tree_process PID LOCATOR [OPTION...]`."""

from __future__ import annotations

import sys

from everbeat.cli.worker_tree import main
from everbeat.runtime.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    main(["worker", *sys.argv[2:]])
