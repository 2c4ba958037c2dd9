"""Loaded by every Python process of an engine with several workers: they wait for each other by yielding in a loop.

With as few cores as workers that keeps everything else from running, for seconds at a time with some kernels; a nap as
short as this changes nothing else.
"""

import os
import time

os.sched_yield = lambda: time.sleep(0.0001)
