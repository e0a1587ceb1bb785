"""OpenAI's Files and Batch APIs: requests in a file that the frontend sends while it has time.

    stored_files.py    the files on disk
    multipart.py       reads an upload
    stored_batches.py  the batches on disk
    batch_lines.py     the lines of input files and result files
    line_requests.py   sends one line to the application itself
    batch_run.py       runs one batch
    batch_runner.py    runs all batches
    lifespan.py        starts and stops the runner with the application

The folder on disk contains the complete state, so batches continue after a restart.
"""
