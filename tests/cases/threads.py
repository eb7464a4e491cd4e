"""Groups of one process, each in a thread of its own."""

from concurrent import futures

_LIMIT_SECS = 600.0


def together(*runs):
    """Runs each in a thread of its own; returns what they return, or raises.

    Once all have ended, or after ten minutes.
    """
    pool = futures.ThreadPoolExecutor(len(runs))
    jobs = [pool.submit(run) for run in runs]
    pool.shutdown(wait=False)
    futures.wait(jobs, _LIMIT_SECS)
    return [job.result(timeout=0) for job in jobs]
