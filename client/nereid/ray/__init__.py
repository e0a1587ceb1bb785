"""A Ray Serve application that runs several Nereid servers on a Ray cluster.

    serve run nereid.ray:app model=/models/my-model num_gpus=1 max_replicas=4

The application has two deployments. Each replica of `Server` runs `nereid serve` with its own GPUs.
Each replica of `Ingress` receives HTTP requests. For each request, `PrefixRouter` selects the
server that has received the longest prefix of the prompt. If this server has many more requests
than another server, the router selects the server with the fewest requests.

The extra `ray` installs the requirements: `pip install nereid[ray]`.
"""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from nereid.ray.ingress import Ingress
from nereid.ray.routing import PrefixRouter
from nereid.ray.scaling import ScaleWithLoad
from nereid.ray.server import Server

__all__ = ["Options", "app"]

# Ray does not need to limit the requests. Each server has its own limit, and answers requests above
# this limit with the status 503.
_MAX_ONGOING_REQUESTS = 10_000
_SERVER_DRAIN_S = 60.0
# Loading a model again is slow, so a replica is removed only after a long time of low load.
_DOWNSCALE_DELAY_S = 600.0


class Options(BaseModel):
    """The arguments of `app`.

    Attributes:
        model: the checkpoint, as a path that exists on every node.
        settings: environment variables of the servers, such as {"NEREID_MAX_MODEL_LEN": "8192"}.
        arguments: further flags of `nereid serve`. Ports are chosen automatically.
        replicas: the number of servers. If `max_replicas` is given, the smallest number of servers.
        max_replicas: the largest number of servers. None means no autoscaling.
        num_gpus, num_cpus, resources: the resources of a node that one server reserves.
        waiting_requests: the largest number of waiting sequences, as an average over the servers.
            Above this number, servers are added.
        kv_cache_usage: the largest share of the KV cache in use, as an average over the servers.
            Above this share, servers are added.
        downscale_delay_s: servers are removed after this number of seconds with a low load.
        ingress_replicas: the number of nodes that receive requests. If one of several such nodes
            fails, the other nodes still receive requests.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    settings: dict[str, str] = Field(default_factory=dict)
    arguments: list[str] = Field(default_factory=list)
    replicas: int = Field(default=1, ge=1)
    max_replicas: int | None = Field(default=None, ge=1)
    num_gpus: float = Field(default=0, ge=0)
    num_cpus: float = Field(default=1, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)
    waiting_requests: float = Field(default=8, gt=0)
    kv_cache_usage: float = Field(default=0.8, gt=0, le=1)
    downscale_delay_s: float = Field(default=_DOWNSCALE_DELAY_S, ge=0)
    ingress_replicas: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"max_replicas must be at least replicas ({self.replicas}), but it is "
                f"{self.max_replicas}"
            )
        return self


def app(options: Options) -> Application:
    """Return the Ray Serve application.

    Example: `serve.run(app(Options(model="/models/my-model", replicas=2)))`.
    """
    server = serve.deployment(
        Server,
        name="Server",
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=_SERVER_DRAIN_S,
        ray_actor_options={
            "num_gpus": options.num_gpus,
            "num_cpus": options.num_cpus,
            "resources": options.resources,
        },
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        **_number_of_servers(options),
    ).bind(options.model, options.settings, options.arguments)
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=options.ingress_replicas,
        max_replicas_per_node=1,
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(server)


def _number_of_servers(options: Options) -> dict[str, object]:
    """Return the arguments of the deployment `Server` that set the number of replicas.

    The number is constant if `options` has no largest number. Otherwise, it follows the load.
    """
    if options.max_replicas is None:
        return {"num_replicas": options.replicas}
    policy = AutoscalingPolicy(
        policy_function=ScaleWithLoad,
        policy_kwargs={
            "waiting_requests": options.waiting_requests,
            "kv_cache_usage": options.kv_cache_usage,
        },
    )
    scaling = AutoscalingConfig(
        min_replicas=options.replicas,
        max_replicas=options.max_replicas,
        downscale_delay_s=options.downscale_delay_s,
        policy=policy,
    )
    return {"autoscaling_config": scaling}
