"""The key that `nereid serve` requires at the Triton server's endpoints for management.

These endpoints register shared memory, change the settings of traces and logs, and load models. A
client that can load a model can also send its Python code, which the server then executes. The
Triton server does not check the origin of web pages, so without the key, a page in a browser on the
same machine could do all this.

The key does not protect against other users of the machine if they can read the command line of the
Triton server, which contains the key.
"""

KEY_VARIABLE = "_NEREID_MANAGEMENT_KEY"
"""The frontend reads the key from this environment variable, because it loads and unloads models.
If the variable is missing, the frontend sends no key."""
HEADER = "nereid-management-key"
"""The name of the HTTP header with the key."""
GRPC_HEADER = f"triton-grpc-protocol-{HEADER}"
"""The name of the key in the metadata of a gRPC call. The Triton server adds the prefix."""
