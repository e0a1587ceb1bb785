"""A gRPC server whose streams never end.

Run as a program, this module prints the server's port and serves until the process is killed.
"""

import asyncio

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc


class Endless(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers each stream with responses of 4 KiB until the stream is cancelled.

    A stream with the prompt "silent" receives no response.
    """

    async def ServerLive(self, request, context):
        return service_pb2.ServerLiveResponse(live=True)

    async def ModelInfer(self, request, context):
        await asyncio.Event().wait()

    async def ModelStreamInfer(self, requests, context):
        response = service_pb2.ModelStreamInferResponse()
        response.infer_response.id = "x" * 4096
        async for request in requests:
            if any(b"silent" in raw for raw in request.raw_input_contents):
                await asyncio.Event().wait()
            while True:
                yield response
                await asyncio.sleep(0.01)


async def start():
    """Start the server, and return the server object and its port."""
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Endless(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def main():
    server, port = await start()
    print(port, flush=True)  # noqa: T201 - the parent process reads this
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
