"""OpenAI's Files API and Batch API.

A client uploads a file of requests. The frontend runs these requests with the lowest priority.

    batch_folder.py    finds and checks the folder
    stored_files.py    the files on disk
    receive_upload.py  receives an uploaded file
    multipart.py       parses the form with the file
    stored_batches.py  the batches on disk
    batch_lines.py     reads input files and writes result files
    line_requests.py   sends the request of one line to the frontend's own application
    batch_run.py       runs one batch
    batch_runner.py    runs all batches
    lifespan.py        starts and stops the runner with the application

The folder on disk contains the complete state, so batches continue after a restart.
"""
