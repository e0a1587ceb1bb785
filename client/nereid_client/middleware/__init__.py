"""Checks and limits that apply to each HTTP request before it reaches a route.

These classes are plain ASGI middleware, because Starlette's BaseHTTPMiddleware hides the client's
disconnect from the routes. A request passes through the middleware in this order:

1. request_metrics: counts requests and refusals for GET /metrics
2. request_ids: gives each request an id
3. tracing: records a span for each request
4. allowed_hosts: rejects requests with an unknown host name (403)
5. (CORS, from Starlette)
6. foreign_pages: rejects requests of web pages of other origins (403)
7. api_key, client_keys: rejects requests without a key (401), and identifies the client
8. admission_control: limits the requests that run at the same time (429, 503)
9. timeouts: limits the duration of a request (504)
10. body_limit: limits the size of a body and the time to receive a body (408, 413, 429)

http_protocol.py limits the headers of a request, before the application sees the request.
"""
