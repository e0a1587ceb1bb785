"""Checks and limits that apply to each HTTP request before it reaches a route.

These classes are plain ASGI middleware, because Starlette's BaseHTTPMiddleware hides the client's
disconnect from the routes. A request passes them in this order:

1. request_metrics: counts requests and refusals for GET /metrics
2. request_ids: gives each request an id
3. (CORS, from Starlette)
4. api_key: rejects requests without the key (401)
5. admission_control: limits the requests that run at the same time (429, 503)
6. timeouts: limits the duration of a request (504)
7. body_limit: limits the size of a body (413)
"""
