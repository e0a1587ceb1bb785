"""Several frontend processes (workers) that listen on one port.

`worker_pool.py` starts the workers, restarts workers that have ended, and sends signals to all
workers. A client can send each request to any worker, so the workers share this state:

- The counts of running requests, the used limits of API keys, and the stored responses are in
  SQLite databases.
- The metrics are in files. prometheus_client adds the numbers of all workers.
- A client can cancel or read a response that another worker generates. The request of the client is
  then forwarded to the other worker.
- Requests that abort other requests are sent to all workers.
- The files of the Batch API are on disk, and only one worker runs batches.

The workers do not share this state:

- Each worker may use an equal part of max_total_body_bytes.
- Each worker measures how many of its own requests an overloaded Triton server rejects.
- A worker does not know which models the other workers use. A frontend for several models therefore
  has only one worker.
"""
