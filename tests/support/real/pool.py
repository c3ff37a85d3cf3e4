#!/usr/bin/env python3
"""A service with a multiprocessing pool whose processes are busy, and that dies without closing it.

The pool's processes know nothing of the end of the service: they compute on and, when done, wait for ever for more.
When all are busy it prints a line

    {"service": 4700, "pool": [4711, 4712]}
"""

import argparse
import json
import multiprocessing
import os
import resource
import signal

SIZE = 2


def compute_for_ever(_):
    os.write(announce.fileno(), b"%d\n" % os.getpid())
    while True:
        pass


def take(write_end):
    """Run first in each process of the pool; only so it reaches one that is not a fork of the service."""
    global announce
    announce = write_end


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start-method", choices=("fork", "spawn", "forkserver"), default="fork",
                        help="forkserver: the processes are not children of the service")
    parser.add_argument("--then", choices=("wait", "abort"), default="wait",
                        help="what the service does when all are busy")
    options = parser.parse_args()

    multiprocessing.set_start_method(options.start_method)
    read_end, write_end = multiprocessing.Pipe(duplex=False)
    pool = multiprocessing.Pool(SIZE, take, (write_end,))
    pool.map_async(compute_for_ever, range(SIZE), chunksize=1)
    with open(read_end.fileno(), closefd=False) as lines:
        pids = [int(lines.readline()) for _ in range(SIZE)]
    print(json.dumps({"service": os.getpid(), "pool": pids}), flush=True)

    # An exception or sys.exit would end the pool, as Python cleans up.
    if options.then == "abort":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()
    signal.pause()


if __name__ == "__main__":
    main()
