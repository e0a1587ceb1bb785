"""Several frontend processes (workers) that listen on one port.

`worker_pool.py` starts the workers, restarts a worker that ended, and passes signals on to all
workers. The state of the frontend is shared in these ways:

- Running requests, the limits of API keys and stored responses are in SQLite databases.
- The metrics are in files of prometheus_client, which adds the numbers of all workers.
- A request about a request that runs in another worker is forwarded to that worker.
- Each worker may use an equal part of max_total_body_bytes.
- The files of the Batch API are on disk, and only one worker runs batches.
- Each worker measures for itself how many requests an overloaded Triton server rejects.
- Several models cannot be combined with several workers, because a worker does not know which
  models the other workers use.
"""
