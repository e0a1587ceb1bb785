"""The options that the load test passes to locust."""

from loadtest.command_line import Option

SHARED_OPTIONS = {
    "--triton-url": Option("http://127.0.0.1:8000", "HTTP endpoint of the Triton server"),
    "--grpc-url": Option("127.0.0.1:8001", "gRPC endpoint of the Triton server"),
    "--embedding-model": Option("embed", "name of the embedding model in the API"),
    "--rerank-model": Option("rerank", "name of the reranker in the API"),
    "--arrivals": Option(
        None,
        "arrival process that replaces the one of each scenario",
        choices=("closed", "poisson", "constant"),
    ),
    "--rate": Option(0.0, "requests/s of each user, with --arrivals"),
    "--request-limit": Option(60.0, "time limit of a request in seconds"),
    "--seed": Option(0, "seed of all random choices"),
}
