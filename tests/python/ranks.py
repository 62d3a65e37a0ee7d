"""Ranks of one host, each a process."""

import multiprocessing
import os
import tempfile


def run(body, ranks, *arguments):
    """body(rank, ranks, *arguments) in a process per rank; what each returned."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(ranks) as pool:
        pending = [pool.apply_async(body, (rank, ranks, *arguments)) for rank in range(ranks)]
        return [result.get(timeout=300) for result in pending]


def fresh_path():
    return os.path.join(tempfile.mkdtemp(), "group")
