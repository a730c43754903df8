"""Run modes for parametrised tests. Sample programs do not import this module, because pytest would slow down each task process."""

from tests.variants import long_except
from tests.worker.sample_steps import MODES

SOME_MODES = long_except(MODES, "in_process", "on_loop")
