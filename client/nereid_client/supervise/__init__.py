"""Supervision of the two programs that `nereid serve` runs: a Triton server and the frontend.

- startup_checks.py: rejects wrong settings before the start
- check_checkpoint.py, weight_files.py: reject damaged checkpoints before the start
- supervisor.py: START HERE; starts, announces, restarts, drains and ends the programs
- child_processes.py: starts a program, reads its output, and ends it with all its descendants
- shared_memory.py: deletes the shared memory of Triton servers that were killed
- start_fork_server.py: starts the process that imports torch once for all models
- warmup.py, pooling_models.py: wait until each model has answered a request
- stub_processes.py, hang_detection.py: find failures that the Triton server does not report
- memory_watch.py: kills a process that uses too much memory, so that the process is restarted
- restart_policy.py, unfinished_requests.py: decide when to restart, and when all requests are done
"""
