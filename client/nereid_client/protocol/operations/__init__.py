"""The bodies of requests that operate a server, such as the loading of a LoRA adapter."""
